"""The definition of block-sparse attention, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tachyscope.kernels.attention.reference import attention_reference
from tachyscope.kernels.block_table import BlockTable
from tachyscope.kernels.codes import decode


def block_sparse_attention_reference(q: Tensor, k: Tensor, v: Tensor, past: BlockTable) -> Tensor:
    """Tile by tile: attention over the entries of its blocks, and the present ones."""
    group, slot = q.shape[1] // k.shape[1], torch.arange(past.block, device=q.device)
    past = past._replace(
        k=decode(past.k, past.k_scale, torch.float64), v=decode(past.v, past.v_scale, torch.float64)
    )
    out = torch.empty_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            g = h // group
            for i, part in enumerate(q[b, h].split(past.tile)):
                ids = past.ids[b, h, i, : past.counts[b, h, i]].long()
                read = (ids[:, None] * past.block + slot).flatten()
                read = read[read < past.k.shape[2]]
                read = read[past.log_count[b, g, read] > -math.inf]
                keys = torch.cat([past.k[b, g, read], k[b, g]])
                values = torch.cat([past.v[b, g, read], v[b, g]])
                log_count = torch.zeros(len(keys), dtype=torch.float64, device=q.device)
                log_count[: len(read)] = past.log_count[b, g, read].double()
                rows = slice(i * past.tile, (i + 1) * past.tile)
                out[b, h, rows] = attention_reference(
                    part[None, None], keys[None, None], values[None, None], log_count[None, None]
                )[0, 0]
    return out
