"""Move entries between a cache's slots."""

from __future__ import annotations

from torch import Tensor

from tachyscope.kernels.device import HAS_TRITON, reads_keys
from tachyscope.kernels.slots import torch as torch_backend

if HAS_TRITON:
    from tachyscope.kernels.slots import triton as triton_backend


def permute(x: Tensor, order: Tensor, back: bool = False) -> None:
    """Entry order[i] of x [B, H, n, D] to slot i, order [B, H, n]; or `back` from there."""
    if reads_keys(x):
        triton_backend.permute(x, order, back)
    else:
        torch_backend.permute(x, order, back)


def shift(x: Tensor, source: int, target: int, count: int) -> None:
    """`count` entries of x [B, H, n, ...] from slot `source` to `target`; the two may overlap."""
    if x.dim() == 4 and reads_keys(x):
        triton_backend.shift(x, source, target, count)
    else:
        torch_backend.shift(x, source, target, count)
