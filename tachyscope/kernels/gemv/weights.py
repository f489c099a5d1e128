"""Matrices as a decode step reads them: as they are, or int8 with a scale a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ZERO = 128  # what a stored byte is above its code, so that a kernel makes floats by bits alone


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix [N, K]: floats, or bytes (code + 128) of which row n stands for scale[n] · code."""

    data: Tensor
    scale: Tensor | None = None  # [N] float32
    bias: Tensor | None = None  # [N]

    @property
    def rows(self) -> int:
        return self.data.shape[0]

    @property
    def columns(self) -> int:
        return self.data.shape[1]

    @property
    def bytes(self) -> int:
        parts = (self.data, self.scale, self.bias)
        return sum(x.numel() * x.element_size() for x in parts if x is not None)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The matrix as floats."""
        if self.scale is None:
            return self.data.to(dtype)
        codes = self.data.to(torch.float32) - ZERO
        return (codes * self.scale[:, None]).to(dtype)

    def part(self, rows: int) -> Weight:
        """The first rows."""
        scale, bias = (None if x is None else x[:rows] for x in (self.scale, self.bias))
        return Weight(self.data[:rows], scale, bias)


def to_int8(weight: Weight) -> Weight:
    """Rounded to 255 levels, each row by its largest entry."""
    data = weight.dense(torch.float32)
    scale = data.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    codes = (data / scale[:, None]).round().add_(ZERO).to(torch.uint8)
    return Weight(codes, scale, weight.bias)


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm (no bias) or layer norm of a matrix's input."""

    weight: Tensor
    bias: Tensor | None
    eps: float
