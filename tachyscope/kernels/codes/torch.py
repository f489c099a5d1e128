"""Codes by stock torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
# the largest code
LARGEST = {torch.int8: 127.0, torch.uint8: torch.finfo(FP8).max}
# of int4: the largest, channels that share a scale, and the least scale that float16 holds exactly
INT4_LARGEST, INT4_GROUP, FP16_LEAST = 7.0, 32, 2.0**-14


class Past(NamedTuple):
    """Past entries as they are stored: k, v [B, Hkv, n, D], and of codes the scales [B, Hkv, n]."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


def encode(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of x [..., D] and their scales [...]."""
    wide = x.float()
    scale = wide.abs().amax(-1).clamp(min=1e-12) / LARGEST[dtype]
    code = wide / scale.unsqueeze(-1)
    return code.round().to(dtype) if dtype == torch.int8 else code.to(FP8).view(dtype), scale


def int4_groups(width: int) -> int:
    """Scales of a vector of so many channels."""
    return width // INT4_GROUP if width % INT4_GROUP == 0 else 1


def encode_int4(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] as 4 bits a channel [..., D / 2], and scales [..., groups] of float16.

    A byte holds channel i in its low half, and channel i + D / 2 in its high one.
    """
    grouped = x.float().unflatten(-1, (int4_groups(x.shape[-1]), -1))
    scale = (grouped.abs().amax(-1) / INT4_LARGEST).clamp(min=FP16_LEAST).half()
    number = (grouped / scale.float().unsqueeze(-1)).round().clamp(-INT4_LARGEST, INT4_LARGEST)
    low, high = (number.flatten(-2) + 8).to(torch.uint8).chunk(2, -1)
    return low | high << 4, scale


def decode_int4(code: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The vectors [..., D] of `encode_int4`."""
    number = torch.cat([code & 15, code >> 4], -1).float() - 8
    grouped = number.unflatten(-1, (scale.shape[-1], -1))
    return (grouped * scale.float().unsqueeze(-1)).flatten(-2).to(dtype)


def decode(code: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The vectors [..., D] of codes and scales [...]."""
    return (numbers(code).float() * scale.unsqueeze(-1)).to(dtype)


def numbers(x: Tensor) -> Tensor:
    """Vectors or codes as numbers: of codes the direction alone."""
    return x.view(FP8) if x.dtype == torch.uint8 else x
