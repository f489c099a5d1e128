"""A decode step's matrix product by stock torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from tachyscope.kernels.gemv.weights import Norm, Weight


def normed(x: Tensor, norm: Norm | None) -> Tensor:
    if norm is None:
        return x
    size = (x.shape[-1],)
    if norm.bias is None:
        return F.rms_norm(x, size, norm.weight, norm.eps)
    return F.layer_norm(x, size, norm.weight, norm.bias, norm.eps)


def linear(x: Tensor, weight: Weight) -> Tensor:
    """weight · x + bias for any number of tokens x [..., K]."""
    return F.linear(x, weight.dense(x.dtype), weight.bias)


def gemv(
    out: Tensor,
    x: Tensor,
    weights: tuple[Weight, ...],
    norm: Norm | None = None,
    gelu: bool = False,
    add: bool = False,
    product: Callable[[Tensor, Weight], Tensor] = linear,
) -> Tensor:
    x = normed(x, norm)
    parts = [product(x, weight) for weight in weights]
    if len(parts) > 1 and out.dtype == x.dtype and not (gelu or add):
        return torch.cat(parts, -1, out=out)
    y = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    y = F.gelu(y) if gelu else y
    return out.add_(y) if add else out.copy_(y)
