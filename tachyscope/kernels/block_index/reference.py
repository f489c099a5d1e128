"""The definitions of buckets, of a block's code and of a tile's mass on blocks, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tachyscope.kernels.block_index.torch import Codes
from tachyscope.kernels.hashing import planes


def buckets_reference(x: Tensor, bits: int) -> Tensor:
    """Plane by plane: which side x [..., D] lies on, as binary digits."""
    number = torch.zeros(x.shape[:-1], dtype=torch.int64)
    for normal in planes(bits, x.shape[-1], x.device).double().mT:
        number = number * 2 + (x.double() @ normal >= 0).long().cpu()
    return number


def encode_blocks_reference(k: Tensor, log_count: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The mean key [B, Hkv, blocks, D] of every block's entries, and the log of their weight."""
    batch, heads, slots = log_count.shape
    means = torch.zeros(batch, heads, slots // block, k.shape[3], dtype=torch.float64)
    weights = torch.full(means.shape[:3], -1e30, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(slots // block):
                live = [s for s in range(i * block, (i + 1) * block) if log_count[b, h, s] > -1e30]
                if live:
                    means[b, h, i] = k[b, h, live].double().mean(0)
                    weights[b, h, i] = log_count[b, h, live].double().logsumexp(0)
    return means, weights


def block_mass_reference(q: Tensor, codes: Codes, blocks: int, tile: int) -> Tensor:
    """All scores by the int8 codes of queries and blocks, in float64."""
    group = q.shape[1] // codes.code.shape[1]
    code, scale, weight = (
        x[:, :, :blocks].double().repeat_interleave(group, 1).cpu() for x in codes
    )
    q = q.double().cpu()
    step = q.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    scores = (q / step).round() @ code.mT * step * scale.mT / math.sqrt(q.shape[3])
    p = (scores + weight.unsqueeze(2)).softmax(-1)
    return torch.stack([part.sum(2) for part in p.split(tile, 2)], 2)
