"""Move entries between a cache's slots, by stock torch."""

from __future__ import annotations

import torch
from torch import Tensor


def permute(x: Tensor, order: Tensor, back: bool = False) -> None:
    """Entry order[i] of x [B, H, n, D] to slot i, order [B, H, n]; or `back` from there."""
    index = order.long().unsqueeze(-1).expand_as(x)
    x.copy_(torch.empty_like(x).scatter_(2, index, x) if back else x.gather(2, index))


def shift(x: Tensor, source: int, target: int, count: int) -> None:
    """`count` entries of x [B, H, n, ...] from slot `source` to `target`; the two may overlap."""
    # the ranges may overlap, so through a copy
    x[:, :, target : target + count] = x[:, :, source : source + count].clone()
