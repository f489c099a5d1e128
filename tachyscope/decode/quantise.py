"""Linears whose weights are codes of 8 or 4 bits: a half or a quarter of the bytes a step reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tachyscope.kernels.gemv import Kind, Norm, Weight, to_codes
from tachyscope.kernels.gemv.weights import GROUP, int4_weight, int8_weight


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
        """The matrix as floats, decoded at every call."""
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
    """A linear's matrix as kernels read it; of torchao's codes a copy, arranged for them."""
    if isinstance(linear, CodedLinear):
        return Weight(linear.codes, linear.scale, linear.bias)
    assert isinstance(linear, nn.Linear)
    bias = None if linear.bias is None else linear.bias.detach()
    if _is_plain(linear):
        return Weight(linear.weight.detach(), None, bias)
    codes: Any = linear.weight.detach()
    if _torchao_bits(codes) == 8:
        return int8_weight(codes.qdata.int(), codes.scale.flatten(), bias)
    scale, zero = codes.scale.float(), codes.zero_point
    offset = -(8.0 if zero is None else 8.0 + zero.float()) * scale
    return int4_weight(codes.qdata.int() + 8, scale, offset, bias)


def bits_of(linear: nn.Module) -> int:
    """Of a weight as kernels read it; 0 where they cannot.

    They read floats, this package's codes, and of torchao's those that have a scale for a row of
    int8, or for 128 columns of int4.
    """
    if isinstance(linear, CodedLinear):
        return Weight(linear.codes, linear.scale).bits
    if not isinstance(linear, nn.Linear):
        return 0
    return 16 if _is_plain(linear) else _torchao_bits(linear.weight)


def _is_plain(linear: nn.Linear) -> bool:
    return type(linear.weight) is nn.Parameter and type(linear.weight.data) is torch.Tensor


def _torchao_bits(weight: Any) -> int:
    """By what it holds: torchao need not be installed."""
    codes, scale = getattr(weight, "qdata", None), getattr(weight, "scale", None)
    if not isinstance(codes, Tensor) or not isinstance(scale, Tensor) or codes.dim() != 2:
        return 0
    rows, columns = codes.shape
    if codes.dtype != torch.int8 or codes.shape != weight.shape:
        return 0
    zero = getattr(weight, "zero_point", None)
    if str(getattr(weight, "target_dtype", None)) == "torch.int4":
        groups = (rows, columns // GROUP)
        fits = columns % GROUP == 0 and scale.shape == groups
        return 4 if fits and (zero is None or zero.shape == groups) else 0
    fits = scale.numel() == rows and columns % 4 == 0
    return 8 if fits and (zero is None or not bool(zero.any())) else 0


def norm_of(norm: nn.RMSNorm | nn.LayerNorm) -> Norm:
    bias = norm.bias if isinstance(norm, nn.LayerNorm) else None
    eps = norm.eps
    assert eps is not None
    return Norm(norm.weight.detach(), None if bias is None else bias.detach(), eps)
