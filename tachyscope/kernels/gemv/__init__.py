"""A matrix times one token, or the few that share a step: norm, product, bias, residual at once."""

from __future__ import annotations

from torch import Tensor

from tachyscope.kernels.device import (
    DECODE_DTYPES,
    HAS_TRITON,
    MAX_DECODE_ROWS,
    has_decode_kernel,
)
from tachyscope.kernels.gemv import torch as torch_backend
from tachyscope.kernels.gemv.weights import Kind, Norm, Weight, to_codes

if HAS_TRITON:
    from tachyscope.kernels.gemv import triton as triton_backend

__all__ = ["Kind", "Norm", "Weight", "gemv", "linear", "to_codes"]

MOST = 128  # tokens that share one reading of codes, as drafts do


def linear(x: Tensor, weight: Weight) -> Tensor:
    """weight · x + bias for any number of tokens x [..., K].

    On a GPU codes are not decoded first for few tokens: that takes longer than the product.
    """
    few = x.dim() == 2 and MAX_DECODE_ROWS < len(x) <= MOST and x.dtype in DECODE_DTYPES
    if few and weight.bits < 16 and HAS_TRITON and x.is_cuda:
        out = x.new_empty(len(x), weight.rows)
        return triton_backend.gemv(out, x.contiguous(), (weight,))
    return torch_backend.linear(x, weight)


def gemv(
    out: Tensor,
    x: Tensor,
    weights: tuple[Weight, ...],
    norm: Norm | None = None,
    gelu: bool = False,
    add: bool = False,
) -> Tensor:
    """out [B, ΣN] = weights · norm(x) + bias, side by side, for x [B, K]; `add`: out += that."""
    if has_decode_kernel(x):
        return triton_backend.gemv(out, x, weights, norm, gelu, add)
    return torch_backend.gemv(out, x, weights, norm, gelu, add, linear)
