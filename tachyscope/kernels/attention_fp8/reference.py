"""The definition of attention of float8 operands, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tachyscope.kernels.attention_fp8.torch import (
    FP8,
    OFFSET,
    Entries,
    Listed,
    dequantise,
)


def attention_fp8_reference(
    q: Tensor,
    q_scale: Tensor,
    present: Entries,
    n: int,
    log_count: Tensor | None = None,
    past: Listed | None = None,
) -> Tensor:
    """softmax(scores + log_count) v of what the codes stand for, its weights rounded to float8.

    q [B, H, S, D] and q_scale [B, H, S] as `quantise_queries` makes them; of the present entries
    the first n are read, of the past each tile's listed blocks. A row's largest weight lies between
    2^7 and 2^8 when it is rounded; the sum that divides is of weights not rounded. In float64.
    """
    group, like = q.shape[1] // present.k.shape[1], q_scale.double()
    k, v = (x[:, :, :n] for x in dequantise(present, torch.float64))
    weight = like.new_zeros(q.shape[0], present.k.shape[1], n)
    if log_count is not None:
        weight = weight + log_count.double()
    out = like.new_empty(*q.shape[:3], v.shape[3])
    old_k, old_v, old_weight = k[:, :, :0], v[:, :, :0], weight[:, :, :0]
    tile = q.shape[2]
    if past is not None:
        slots = past.log_count.shape[2]
        old_k, old_v = (x[:, :, :slots] for x in dequantise(past.entries, torch.float64))
        old_weight, tile = past.log_count[:, :, : old_k.shape[2]].double(), past.tile
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            g = h // group
            for i, start in enumerate(range(0, q.shape[2], tile)):
                rows = slice(start, start + tile)
                read = torch.zeros(0, dtype=torch.long, device=q.device)
                if past is not None:
                    ids = past.ids[b, h, i, : past.counts[b, h, i]].long()
                    slot = torch.arange(past.entries.block, device=q.device)
                    read = (ids[:, None] * past.entries.block + slot).flatten()
                    read = read[read < old_k.shape[2]]
                keys = torch.cat([old_k[b, g, read], k[b, g]])
                values = torch.cat([old_v[b, g, read], v[b, g]])
                weights = torch.cat([old_weight[b, g, read], weight[b, g]])
                part = q[b, h, rows].double() * q_scale[b, h, rows, None].double()
                scores = (part @ keys.mT + weights) / math.log(2)
                most = scores.amax(-1, keepdim=True).clamp(min=-1e30).ceil()
                shares = torch.exp2(scores - most + OFFSET)
                rounded = shares.float().to(FP8).double()
                out[b, h, rows] = rounded @ values / shares.sum(-1, keepdim=True).clamp(min=1e-30)
    return out
