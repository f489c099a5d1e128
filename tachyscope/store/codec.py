"""Codecs of past keys and values: how they are quantised, and the scales to decode them."""

from __future__ import annotations

import abc
from dataclasses import dataclass

import torch
from torch import Tensor

from tachyscope.core.types import Shape
from tachyscope.kernels import codes
from tachyscope.kernels.codes.torch import channel_groups, encode_packed


class Codec(abc.ABC):
    """Quantises vectors [B, H, slots, D] to codes [B, H, slots, width] with scales."""

    dtype: torch.dtype
    scale_dtype: torch.dtype = torch.float16
    group: int = 1  # slots that share scales, so that entries move in whole groups

    @property
    def directional(self) -> bool:
        """Whether a code, read as numbers, has the direction of its vector."""
        return False

    @property
    def noisy(self) -> bool:
        """Whether codes of keys are so coarse that `noise` is corrected in log-weights."""
        return False

    @abc.abstractmethod
    def width(self, head_dim: int) -> int:
        """Elements of a code."""

    @abc.abstractmethod
    def scale_size(self, head_dim: int) -> tuple[int, ...]:
        """The shape of a group's scales."""

    def bytes(self, head_dim: int) -> int:
        """Bytes of a code, without its scales."""
        return self.width(head_dim) * self.dtype.itemsize

    @abc.abstractmethod
    def encode(self, x: Tensor, code: Tensor, scale: Tensor) -> None:
        """Write the codes and scales of x [B, H, n, D]."""

    @abc.abstractmethod
    def decode(self, code: Tensor, scale: Tensor, out: Tensor, first: int) -> None:
        """Decode codes to `out` [B, H, n, D]; the first is slot `first` of its group."""

    def noise(self, scale: Tensor, square: Tensor) -> Tensor:
        """The variance [B, H] of scores that rounding of keys with these scales causes.

        `square` [B, H, D] is the queries' mean square. Noise in a score multiplies exp(score) by
        exp(variance / 2) in the mean, so that a coded entry would get more attention than an exact
        one.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Bytes(Codec):
    """8 bits a channel and a scale for each entry, by the kernels of `kernels/codes`."""

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
    """4 or 2 bits a channel, with a step and a zero: for each channel of `group` entries, or with a
    group of 1 for every 32 channels of an entry."""

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
    """The largest divisor of a latent frame's entries that is `most` or less."""
    return max(n for n in range(1, most + 1) if shape.tokens_per_frame % n == 0)


def write_mean_square(out: Tensor, q: Tensor) -> None:
    """Write the mean square of queries [B, H, S, D] to out [B, Hkv, D], for `Codec.noise`."""
    out.copy_(q.float().square().mean(2).unflatten(1, (out.shape[1], -1)).mean(2))
