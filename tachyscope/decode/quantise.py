"""Linears whose weights are codes of 8 or 4 bits: a half or a quarter of the bytes a step reads."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tachyscope.kernels.gemv import Kind, Norm, Weight, to_codes


class CodedLinear(nn.Module):
    """A linear of int8 or int4 weights. The engine's kernels read codes; anything else, floats."""

    codes: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, kind: Kind) -> None:
        super().__init__()
        rounded = to_codes(Weight(linear.weight.detach()), kind)
        self.register_buffer("codes", rounded.data)
        self.register_buffer("scale", rounded.scale)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())
        self.dtype = linear.weight.dtype

    @property
    def weight(self) -> Tensor:
        """The matrix as floats, made anew."""
        return Weight(self.codes, self.scale).dense(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def quantise(module: nn.Module, kind: Kind) -> None:
    """Replace every nn.Linear inside a module, in place.

    "int8": a scale a row. "int4": a scale and an offset for every 128 columns of a row.
    """
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, CodedLinear(child, kind))
        else:
            quantise(child, kind)


def weight_of(linear: nn.Module) -> Weight:
    """A linear's matrix as kernels read it."""
    if isinstance(linear, CodedLinear):
        return Weight(linear.codes, linear.scale, linear.bias)
    assert isinstance(linear, nn.Linear)
    bias = None if linear.bias is None else linear.bias.detach()
    return Weight(linear.weight.detach(), None, bias)


def is_readable(linear: nn.Module) -> bool:
    """Whether kernels can read it; a quantised tensor of another library's they cannot."""
    if isinstance(linear, CodedLinear):
        return True
    plain = isinstance(linear, nn.Linear) and type(linear.weight) is nn.Parameter
    return plain and type(linear.weight.data) is torch.Tensor


def norm_of(norm: nn.RMSNorm | nn.LayerNorm) -> Norm:
    bias = norm.bias if isinstance(norm, nn.LayerNorm) else None
    eps = norm.eps
    assert eps is not None
    return Norm(norm.weight.detach(), None if bias is None else bias.detach(), eps)
