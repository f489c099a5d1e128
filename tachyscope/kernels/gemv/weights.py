"""Matrices as a decode step reads them: as they are, or as codes of 8 or 4 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError

Kind = Literal["int8", "int4"]
GROUP = 128  # columns that share a scale and an offset in int4
MULTIPLE = {16: 1, 8: 4, 4: GROUP}  # of which columns must be a multiple, by bits


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix [N, K]: floats, or codes in words of 32 bits.

    int8: codes 0 to 255 stand for scale[n] · (code - 128). Word i of a row [N, K / 4] holds the
    codes of columns i, K/4 + i, K/2 + i and 3K/4 + i, the first in its lowest byte.
    int4: codes 0 to 15 stand for scale · code + offset, both bfloat16, by row and group of 128
    columns: scale [N, K / 128] int32 has the scale in its low half and the offset in its high one.
    Words i = 16 g + j of a row [N, K / 8] hold columns 128 g + j, then 16, 32, ... 112 further.

    So a thread reads 16 bytes of codes beside a few bytes of inputs that lie side by side.
    """

    data: Tensor
    scale: Tensor | None = None  # [N] float32, or [N, K / 128] int32
    bias: Tensor | None = None  # [N]

    @property
    def bits(self) -> int:
        if self.scale is None:
            return 16
        return 8 if self.scale.dim() == 1 else 4

    @property
    def rows(self) -> int:
        return self.data.shape[0]

    @property
    def columns(self) -> int:
        return self.data.shape[1] * (1 if self.bits == 16 else 32 // self.bits)

    @property
    def bytes(self) -> int:
        parts = (self.data, self.scale, self.bias)
        return sum(x.numel() * x.element_size() for x in parts if x is not None)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The matrix as floats."""
        if self.scale is None:
            return self.data.to(dtype)
        codes = _codes(self.data, self.bits).float()
        if self.bits == 8:
            return ((codes - 128) * self.scale[:, None]).to(dtype)
        scale, offset = _halves(self.scale)
        codes = codes.unflatten(1, (-1, GROUP))
        return (codes * scale[:, :, None] + offset[:, :, None]).flatten(1).to(dtype)

    def pick(self, index: Tensor) -> Weight:
        """Some of the rows."""
        scale, bias = (None if x is None else x[index] for x in (self.scale, self.bias))
        return Weight(self.data[index], scale, bias)

    def like(self, matrix: Tensor) -> Weight:
        """A matrix of floats, stored as this one is."""
        weight = Weight(matrix.contiguous())
        if self.bits == 16:
            return weight
        return to_codes(weight, "int8" if self.bits == 8 else "int4")

    def below(self, other: Weight) -> Weight:
        """A matrix of this one's rows and then the other's, both without a bias."""
        both = self.scale, other.scale
        scale = None if both[0] is None or both[1] is None else torch.cat([both[0], both[1]])
        return Weight(torch.cat([self.data, other.data]), scale)


def to_codes(weight: Weight, kind: Kind) -> Weight:
    """Rounded: int8 by each row's largest entry, int4 between each group's ends."""
    data, bits = weight.dense(torch.float32), 8 if kind == "int8" else 4
    if data.shape[1] % MULTIPLE[bits]:
        raise TachyscopeError(
            f"{kind} weights need a width that is a multiple of {MULTIPLE[bits]}, "
            f"got {data.shape[1]}: leave them as they are"
        )
    tiny = torch.finfo(torch.bfloat16).tiny
    if bits == 8:
        scale = data.abs().amax(1).clamp_min(tiny) / 127
        return int8_weight((data / scale[:, None]).round(), scale, weight.bias)
    groups = data.unflatten(1, (-1, GROUP))
    low, high = groups.amin(2), groups.amax(2)
    scale, offset = ((high - low) / 15).clamp_min(tiny).bfloat16(), low.bfloat16()
    codes = ((groups - offset.float()[:, :, None]) / scale.float()[:, :, None]).round().clamp(0, 15)
    return int4_weight(codes.flatten(1), scale, offset, weight.bias)


def int8_weight(codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Weight:
    """Of codes [N, K] from -128 to 127 and scale [N]."""
    return Weight(_words(codes + 128, 8), scale.float().contiguous(), bias)


def int4_weight(codes: Tensor, scale: Tensor, offset: Tensor, bias: Tensor | None = None) -> Weight:
    """Of codes [N, K] from 0 to 15, scale and offset [N, K / 128]."""
    pair = torch.stack([scale.bfloat16(), offset.bfloat16()], -1).contiguous()
    return Weight(_words(codes, 4), pair.view(torch.int32)[:, :, 0].contiguous(), bias)


def _words(codes: Tensor, bits: int) -> Tensor:
    """Codes [N, K] as words [N, K · bits / 32]."""
    count = 32 // bits
    parts = (
        codes.to(torch.int64).unflatten(1, _order(codes.shape[1], bits)).movedim(2, 0).flatten(2)
    )
    word = torch.zeros_like(parts[0])
    for i in range(count):
        word |= parts[i] << (bits * i)
    return word.to(torch.int32)  # the high bit is the sign


def _codes(words: Tensor, bits: int) -> Tensor:
    count, columns = 32 // bits, words.shape[1] * 32 // bits
    parts = torch.stack([(words >> (bits * i)) & (2**bits - 1) for i in range(count)])
    blocks, _, each = _order(columns, bits)
    return parts.unflatten(2, (blocks, each)).movedim(0, 2).flatten(1)


def _order(columns: int, bits: int) -> tuple[int, int, int]:
    """Columns as blocks, codes of a word, words of a block: what lies side by side comes last."""
    count = 32 // bits
    blocks = 1 if bits == 8 else columns // GROUP
    return blocks, count, columns // count // blocks


def _halves(words: Tensor) -> tuple[Tensor, Tensor]:
    """Two bfloat16 in a word, the low one first, in float32."""
    low, high = words.contiguous().view(torch.bfloat16).unflatten(-1, (-1, 2)).float().unbind(-1)
    return low, high


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm (no bias) or layer norm of a matrix's input."""

    weight: Tensor
    bias: Tensor | None
    eps: float
