"""Gather entries by index, and put them back."""

from __future__ import annotations

import torch
from torch import Tensor


def take(x: Tensor, index: Tensor) -> Tensor:
    """Entries `index` [B, G, m] of x [B, H, n, ...]; G = 1 serves all heads."""
    index = index.expand(-1, x.shape[1], -1)
    if x.dim() == 4:
        index = index.unsqueeze(-1).expand(-1, -1, -1, x.shape[3])
    return x.gather(2, index)


def put(x: Tensor, index: Tensor, new: Tensor) -> None:
    """Write entries `index` [B, G, m] of x [B, H, n, ...]; G = 1 serves all heads."""
    index = index.expand(-1, x.shape[1], -1)
    x.scatter_(2, index.unsqueeze(-1).expand_as(new) if x.dim() == 4 else index, new)


def at_or(x: Tensor, index: Tensor, none: float) -> Tensor:
    """x [B, Hkv, n] at index [B, Hkv, m], and `none` where that is below 0."""
    return x.gather(2, index.long().clamp(min=0)).masked_fill(index < 0, none)


def or_last(index: Tensor, last: int) -> Tensor:
    """An index, and where it is below 0 the last."""
    return torch.where(index < 0, last, index).long()
