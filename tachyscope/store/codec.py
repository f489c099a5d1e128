"""How a past key or value is stored: what its code is, and what is kept to decode it."""

from __future__ import annotations

import abc
from dataclasses import dataclass

import torch
from torch import Tensor

from tachyscope.kernels import codes
from tachyscope.kernels.codes.torch import (
    encode_int2_keys,
    encode_int2_values,
    encode_int4,
    int4_groups,
)


class Codec(abc.ABC):
    """Codes [B, H, slots, width] of vectors [B, H, slots, D], and scales beside them."""

    dtype: torch.dtype
    scale_dtype: torch.dtype = torch.float16
    group: int = 1  # slots that share scales: entries move by whole groups of them

    @property
    def directional(self) -> bool:
        """Whether a code, read as numbers, has the direction of what it stands for."""
        return False

    @abc.abstractmethod
    def width(self, head_dim: int) -> int:
        """Elements of a code."""

    @abc.abstractmethod
    def scale_size(self, head_dim: int) -> tuple[int, ...]:
        """Of a group's scales."""

    def bytes(self, head_dim: int) -> int:
        """What a code takes, scales apart."""
        return self.width(head_dim) * self.dtype.itemsize

    @abc.abstractmethod
    def encode(self, x: Tensor, code: Tensor, scale: Tensor) -> None:
        """Write codes and scales of x [B, H, n, D]."""

    @abc.abstractmethod
    def decode(self, code: Tensor, scale: Tensor, out: Tensor, first: int) -> None:
        """Write what codes stand for to `out` [B, H, n, D].

        `first` slots that share the first scales stand before.
        """


@dataclass(frozen=True)
class Bytes(Codec):
    """A byte a channel and a scale an entry, by the kernels of `kernels/codes`."""

    dtype: torch.dtype
    scale_dtype = torch.float32

    @property
    def directional(self) -> bool:
        return True

    def width(self, head_dim: int) -> int:
        return head_dim

    def scale_size(self, head_dim: int) -> tuple[int, ...]:
        return ()

    def encode(self, x: Tensor, code: Tensor, scale: Tensor) -> None:
        codes.encode(x, code, scale)

    def decode(self, code: Tensor, scale: Tensor, out: Tensor, first: int) -> None:
        codes.decode_into(code, scale, out)


@dataclass(frozen=True)
class Int4Codes(Codec):
    """4 bits a channel and a scale for 32 channels: what a bank's host memory holds too."""

    dtype = torch.uint8

    def width(self, head_dim: int) -> int:
        return head_dim // 2

    def scale_size(self, head_dim: int) -> tuple[int, ...]:
        return (int4_groups(head_dim),)

    def encode(self, x: Tensor, code: Tensor, scale: Tensor) -> None:
        packed, steps = encode_int4(x)
        code.copy_(packed)
        scale.copy_(steps)

    def decode(self, code: Tensor, scale: Tensor, out: Tensor, first: int) -> None:
        codes.decode_packed(code, scale, out, 4)


@dataclass(frozen=True)
class Int2Codes(Codec):
    """2 bits a channel, with a step and a zero: by `group` entries for each channel, or by entry
    for 32 channels where `group` is 1."""

    group: int = 1
    dtype = torch.uint8

    def width(self, head_dim: int) -> int:
        return head_dim // 4

    def scale_size(self, head_dim: int) -> tuple[int, ...]:
        return (2 * (head_dim if self.group > 1 else int4_groups(head_dim)),)

    def encode(self, x: Tensor, code: Tensor, scale: Tensor) -> None:
        by_group = encode_int2_keys(x, self.group) if self.group > 1 else encode_int2_values(x)
        code.copy_(by_group[0])
        scale.copy_(by_group[1])

    def decode(self, code: Tensor, scale: Tensor, out: Tensor, first: int) -> None:
        codes.decode_packed(code, scale, out, 2, self.group, first)
