"""Rotary embedding of queries and keys, straight to where they are kept."""

from __future__ import annotations

from torch import Tensor, empty_like

from tachyscope.kernels.device import HAS_TRITON, has_kernel
from tachyscope.types import Rope

if HAS_TRITON:
    from tachyscope.kernels.rotary import triton as triton_backend


def apply_rotary(out: Tensor | None, x: Tensor, cos: Tensor, sin: Tensor, rope: Rope) -> Tensor:
    """out, or a new tensor, = x [B, H, S, D] rotated by angles [B or 1, 1, S, D]."""
    if has_kernel(x.device, x.dtype, x.shape[3]):
        out = empty_like(x) if out is None else out
        return triton_backend.apply_rotary(out, x, cos, sin, rope.interleaved)
    rotated = rope.apply(x, cos, sin)
    return rotated if out is None else out.copy_(rotated)
