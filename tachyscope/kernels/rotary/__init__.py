"""Rotary embedding of queries and keys, straight to where they are kept."""

from __future__ import annotations

from torch import Tensor

from tachyscope.core.types import Rope
from tachyscope.kernels.dispatch import dispatch


@dispatch
def apply_rotary(out: Tensor | None, x: Tensor, cos: Tensor, sin: Tensor, rope: Rope) -> Tensor:
    """out, or a new tensor, = x [B, H, S, D] rotated by angles [B or 1, 1, S, D]."""
    rotated = rope.apply(x, cos, sin)
    return rotated if out is None else out.copy_(rotated)
