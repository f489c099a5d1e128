"""A matrix times one token, or the few that share a step: norm, product, bias, residual at once."""

from __future__ import annotations

from torch import Tensor

from tachyscope.kernels.dispatch import dispatch
from tachyscope.kernels.gemv import torch as stock
from tachyscope.kernels.gemv.weights import Kind, Norm, Weight, to_codes

__all__ = ["Kind", "Norm", "Weight", "gemv", "linear", "to_codes"]

linear = dispatch(stock.linear)


@dispatch
def gemv(
    out: Tensor,
    x: Tensor,
    weights: tuple[Weight, ...],
    norm: Norm | None = None,
    gelu: bool = False,
    add: bool = False,
) -> Tensor:
    """out [B, ΣN] = weights · norm(x) + bias, side by side, for x [B, K]; `add`: out += that."""
    return stock.gemv(out, x, weights, norm, gelu, add, linear)
