"""Turn queries and keys by their positions, straight to where they are kept."""

from __future__ import annotations

import torch
from torch import Tensor

from tachyscope.kernels import gpu
from tachyscope.types import Rope


def turn_into(out: Tensor | None, x: Tensor, cos: Tensor, sin: Tensor, rope: Rope) -> Tensor:
    """out, or a new tensor, = x [B, H, S, D] turned by angles [B or 1, 1, S, D].

    As `rope.turn` defines it.
    """
    if gpu.suits(x.device, x.dtype, x.shape[3]):
        out = torch.empty_like(x) if out is None else out
        return gpu.turning.turn(out, x, cos, sin, rope.interleaved)
    turned = rope.apply(x, cos, sin)
    return turned if out is None else out.copy_(turned)


def turn_into_reference(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, rope: Rope) -> Tensor:
    """The definition, pair by pair in float64."""
    half = x.shape[3] // 2
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + half)
        c, s = cos[..., b].double(), sin[..., b].double()
        first, second = x[..., a].double(), x[..., b].double()
        out[..., a] = (first * c - second * s).to(out.dtype)
        out[..., b] = (second * c + first * s).to(out.dtype)
    return out
