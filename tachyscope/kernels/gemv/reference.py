"""The definition of a decode step's matrix product, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from tachyscope.kernels.gemv.weights import Norm, Weight


def norm_reference(x: Tensor, norm: Norm | None) -> Tensor:
    """x [B, K] normed, in float64."""
    x = x.double()
    if norm is None:
        return x
    if norm.bias is None:
        return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
    x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    return x * norm.weight.double() + norm.bias.double()


def gemv_reference(
    x: Tensor, weights: tuple[Weight, ...], norm: Norm | None = None, gelu: bool = False
) -> Tensor:
    """[B, sum of N], matrix by matrix in float64."""
    x = norm_reference(x, norm)
    parts = []
    for weight in weights:
        y = x @ weight.dense(torch.float64).T
        parts.append(y if weight.bias is None else y + weight.bias.double())
    y = torch.cat(parts, -1)
    return y * 0.5 * (1 + torch.erf(y / 2**0.5)) if gelu else y
