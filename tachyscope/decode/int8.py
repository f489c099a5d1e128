"""Linears whose weights are int8, a scale a row: half the bytes that a step reads."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tachyscope.kernels.gemv import Norm, Weight, to_int8


class Int8Linear(nn.Module):
    """A linear of int8 weights. The engine's kernels read the bytes; anything else, floats."""

    codes: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        rounded = to_int8(Weight(linear.weight.detach()))
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


def quantise_int8(module: nn.Module) -> None:
    """Replace every nn.Linear inside a module, in place; not of odd width: two codes are a word."""
    for name, child in module.named_children():
        if type(child) is nn.Linear and child.in_features % 2 == 0:
            setattr(module, name, Int8Linear(child))
        else:
            quantise_int8(child)


def weight_of(linear: nn.Module) -> Weight:
    """A linear's matrix as kernels read it."""
    if isinstance(linear, Int8Linear):
        return Weight(linear.codes, linear.scale, linear.bias)
    assert isinstance(linear, nn.Linear)
    bias = None if linear.bias is None else linear.bias.detach()
    return Weight(linear.weight.detach(), None, bias)


def is_readable(linear: nn.Module) -> bool:
    """Whether kernels can read it; a quantised tensor of another library's they cannot."""
    if isinstance(linear, Int8Linear):
        return True
    plain = isinstance(linear, nn.Linear) and type(linear.weight) is nn.Parameter
    return plain and type(linear.weight.data) is torch.Tensor


def norm_of(norm: nn.RMSNorm | nn.LayerNorm) -> Norm:
    bias = norm.bias if isinstance(norm, nn.LayerNorm) else None
    eps = norm.eps
    assert eps is not None
    return Norm(norm.weight.detach(), None if bias is None else bias.detach(), eps)
