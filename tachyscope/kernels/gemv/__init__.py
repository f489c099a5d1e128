"""A matrix times one token, or the few that share a step: norm, product, bias, residual at once."""

from __future__ import annotations

from torch import Tensor

from tachyscope.kernels.device import HAS_TRITON, has_decode_kernel
from tachyscope.kernels.gemv import torch as torch_backend
from tachyscope.kernels.gemv.weights import Kind, Norm, Weight, to_codes

if HAS_TRITON:
    from tachyscope.kernels.gemv import triton as triton_backend

__all__ = ["Kind", "Norm", "Weight", "gemv", "linear", "to_codes"]


def linear(x: Tensor, weight: Weight) -> Tensor:
    """weight · x + bias for any number of tokens x [..., K]."""
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
    backend = triton_backend if has_decode_kernel(x) else torch_backend
    return backend.gemv(out, x, weights, norm, gelu, add)
