"""Linears of bfloat16 weights for float32 activations: half the bytes that a CPU's step reads."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Bf16Linear(nn.Linear):
    """A linear of bfloat16 weights. A compiled step reads these; anything else makes floats."""

    def __init__(self, linear: nn.Linear) -> None:
        with torch.device("meta"):
            super().__init__(linear.in_features, linear.out_features, linear.bias is not None)
        self.weight = nn.Parameter(linear.weight.detach().bfloat16(), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias)


def store_bf16(module: nn.Module) -> None:
    """Replace every nn.Linear inside a module, in place."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, Bf16Linear(child))
        else:
            store_bf16(child)
