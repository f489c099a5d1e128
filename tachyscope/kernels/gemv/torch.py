"""A decode step's matrix product by stock torch; of codes and several tokens by a kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tachyscope.kernels.device import DECODE_DTYPES, HAS_TRITON, MAX_DECODE_ROWS
from tachyscope.kernels.gemv.weights import Norm, Weight

if HAS_TRITON:
    from tachyscope.kernels.gemv import triton as triton_backend

MOST = 128  # tokens that share one reading of codes, as drafts do


def normed(x: Tensor, norm: Norm | None) -> Tensor:
    if norm is None:
        return x
    size = (x.shape[-1],)
    if norm.bias is None:
        return F.rms_norm(x, size, norm.weight, norm.eps)
    return F.layer_norm(x, size, norm.weight, norm.bias, norm.eps)


def linear(x: Tensor, weight: Weight) -> Tensor:
    """On a GPU codes are not decoded first for few tokens: that takes longer than the product."""
    few = x.dim() == 2 and MAX_DECODE_ROWS < len(x) <= MOST and x.dtype in DECODE_DTYPES
    if few and weight.bits < 16 and HAS_TRITON and x.is_cuda:
        out = x.new_empty(len(x), weight.rows)
        return triton_backend.gemv(out, x.contiguous(), (weight,))
    return F.linear(x, weight.dense(x.dtype), weight.bias)


def gemv(
    out: Tensor,
    x: Tensor,
    weights: tuple[Weight, ...],
    norm: Norm | None = None,
    gelu: bool = False,
    add: bool = False,
) -> Tensor:
    x = normed(x, norm)
    parts = [linear(x, weight) for weight in weights]
    if len(parts) > 1 and out.dtype == x.dtype and not (gelu or add):
        return torch.cat(parts, -1, out=out)
    y = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    y = F.gelu(y) if gelu else y
    return out.add_(y) if add else out.copy_(y)
