"""How a past key or value is stored: what its code is, and what is kept to decode it."""

from __future__ import annotations

import abc
from dataclasses import dataclass

import torch
from torch import Tensor

from tachyscope.core.types import Shape
from tachyscope.kernels import codes
from tachyscope.kernels.codes.torch import channel_groups, encode_packed


class Codec(abc.ABC):
    """Codes [B, H, slots, width] of vectors [B, H, slots, D], and scales beside them."""

    dtype: torch.dtype
    scale_dtype: torch.dtype = torch.float16
    group: int = 1  # slots that share scales: entries move by whole groups of them

    @property
    def directional(self) -> bool:
        """Whether a code, read as numbers, has the direction of what it stands for."""
        return False

    @property
    def noisy(self) -> bool:
        """Whether rounded keys change what an entry weighs: see `noise`."""
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

    def noise(self, scale: Tensor, square: Tensor) -> Tensor:
        """The variance [B, H] that rounding gives the scores of keys with these scales.

        `square` [B, H, D] is the queries' mean square. A score's noise e makes exp(score) larger by
        exp(variance / 2) in the mean: an entry would weigh so much more than one that is exact.
        """
        raise NotImplementedError


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
class Packed(Codec):
    """4 or 2 bits a channel, with a step and a zero: by `group` entries for each channel, or where
    that is 1 by entry for 32 channels."""

    bits: int
    group: int = 1
    dtype = torch.uint8

    @property
    def noisy(self) -> bool:
        return self.group == 1

    def width(self, head_dim: int) -> int:
        return head_dim * self.bits // 8

    def scale_size(self, head_dim: int) -> tuple[int, ...]:
        return (2 * (head_dim if self.group > 1 else channel_groups(head_dim)),)

    def encode(self, x: Tensor, code: Tensor, scale: Tensor) -> None:
        packed, steps = encode_packed(x, self.bits, self.group)
        code.copy_(packed)
        scale.copy_(steps)

    def decode(self, code: Tensor, scale: Tensor, out: Tensor, first: int) -> None:
        codes.decode_packed(code, scale, out, self.bits, self.group, first)

    def noise(self, scale: Tensor, square: Tensor) -> Tensor:
        step = scale[..., : scale.shape[3] // 2].float().square().mean(2)
        step = step.repeat_interleave(square.shape[2] // step.shape[2], 2)
        return (square * step).sum(2) / (12 * square.shape[2])


def group_of(shape: Shape, most: int) -> int:
    """The most entries of a latent frame, up to so many, that divide it."""
    return max(n for n in range(1, most + 1) if shape.tokens_per_frame % n == 0)


def write_mean_square(out: Tensor, q: Tensor) -> None:
    """Queries [B, H, S, D] as `Codec.noise` takes them, [B, Hkv, D]."""
    out.copy_(q.float().square().mean(2).unflatten(1, (out.shape[1], -1)).mean(2))
