"""The definition of rotary embedding, in float64."""

from __future__ import annotations

from torch import Tensor

from tachyscope.core.types import Rope


def apply_rotary_reference(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, rope: Rope) -> Tensor:
    """The definition, pair by pair in float64."""
    half = x.shape[3] // 2
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + half)
        c, s = cos[..., b].double(), sin[..., b].double()
        first, second = x[..., a].double(), x[..., b].double()
        out[..., a] = (first * c - second * s).to(out.dtype)
        out[..., b] = (second * c + first * s).to(out.dtype)
    return out
