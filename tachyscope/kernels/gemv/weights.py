"""Matrices as a decode step reads them: as they are, or int8 with a scale a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ZERO = 128  # what a stored byte is above its code, so that a kernel makes floats by bits alone


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix [N, K]: floats, or int8 codes of which row n stands for scale[n] · code.

    Of codes, word i of a row [N, K / 2] holds that of column i in its low byte and that of column
    K / 2 + i in its high one: a kernel then reads 16 bytes at a time beside 16 bytes of inputs.
    """

    data: Tensor
    scale: Tensor | None = None  # [N] float32
    bias: Tensor | None = None  # [N]

    @property
    def rows(self) -> int:
        return self.data.shape[0]

    @property
    def columns(self) -> int:
        return self.data.shape[1] * (1 if self.scale is None else 2)

    @property
    def multiple(self) -> int:
        """Columns must be a multiple of it."""
        return 1 if self.scale is None else 2

    @property
    def bytes(self) -> int:
        parts = (self.data, self.scale, self.bias)
        return sum(x.numel() * x.element_size() for x in parts if x is not None)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The matrix as floats."""
        if self.scale is None:
            return self.data.to(dtype)
        return (_codes(self.data).float() * self.scale[:, None]).to(dtype)

    def pick(self, index: Tensor) -> Weight:
        """Some of the rows."""
        scale, bias = (None if x is None else x[index] for x in (self.scale, self.bias))
        return Weight(self.data[index], scale, bias)

    def like(self, matrix: Tensor) -> Weight:
        """A matrix of floats, stored as this one is."""
        weight = Weight(matrix.contiguous())
        return weight if self.scale is None else to_int8(weight)

    def below(self, other: Weight) -> Weight:
        """A matrix of this one's rows and then the other's, both without a bias."""
        both = self.scale, other.scale
        scale = None if both[0] is None or both[1] is None else torch.cat([both[0], both[1]])
        return Weight(torch.cat([self.data, other.data]), scale)


def to_int8(weight: Weight) -> Weight:
    """Rounded to 255 levels, each row by its largest entry; the number of columns is even."""
    data = weight.dense(torch.float32)
    scale = data.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    return Weight(_words((data / scale[:, None]).round()), scale, weight.bias)


def _words(codes: Tensor) -> Tensor:
    low, high = codes.to(torch.int16).add_(ZERO).chunk(2, 1)
    return low | (high << 8)


def _codes(words: Tensor) -> Tensor:
    low, high = words & 255, (words >> 8) & 255
    return torch.cat([low, high], 1) - ZERO


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm (no bias) or layer norm of a matrix's input."""

    weight: Tensor
    bias: Tensor | None
    eps: float
