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
INT4_LEVELS = 15  # above a zero
FP16_MOST = torch.finfo(torch.float16).max


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


def decode_packed(
    code: Tensor, scale: Tensor, out: Tensor, bits: int, group: int, first: int
) -> None:
    if group > 1:
        index = torch.arange(first, first + code.shape[2], device=code.device) // group
        scale = scale.index_select(2, index)
    decode = decode_int4 if bits == 4 else decode_int2
    out.copy_(decode(code, scale, out.dtype))


def encode_int2_values(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] as 2 bits a channel [..., D / 4], and of every group of channels a step and a zero
    [..., 2 groups] of float16, steps before zeros.

    A byte holds channels i, i + D / 4, i + D / 2 and i + 3 D / 4, the first in its lowest bits.
    """
    grouped = x.float().unflatten(-1, (int4_groups(x.shape[-1]), -1))
    number, step, zero = _levels(grouped, -1, 3)
    return _pack_int2(number.flatten(-2)), torch.cat([step, zero], -1)


def encode_int2_keys(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """x [B, H, n, D] as 2 bits a channel [B, H, n, D / 4], and of every `group` entries a step and
    a zero for each channel [B, H, n / group, 2 D] of float16."""
    number, step, zero = _levels(x.float().unflatten(2, (-1, group)), 3, 3)
    return _pack_int2(number.flatten(2, 3)), torch.cat([step, zero], -1)


def decode_int2(code: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The vectors [..., D] of codes [..., D / 4], with steps and zeros [..., 2 groups or 2 D]."""
    number = torch.cat([code >> shift & 3 for shift in (0, 2, 4, 6)], -1)
    step, zero = scale.float().chunk(2, -1)
    grouped = number.unflatten(-1, (step.shape[-1], -1)) * step.unsqueeze(-1)
    return (grouped + zero.unsqueeze(-1)).flatten(-2).to(dtype)


def encode_int4_block(x: Tensor) -> tuple[Tensor, Tensor]:
    """Entries x [..., n, D] as 4 bits a channel [..., n, D / 2], and of all of them a step and a
    zero for each channel [..., 2, D] of float16.

    A key's channel lies off zero by much more than it varies among entries.
    """
    number, step, zero = _levels(x.float(), -2, INT4_LEVELS)
    low, high = number.chunk(2, -1)
    return low | high << 4, torch.stack([step, zero], -2)


def decode_int4_block(code: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The entries [..., n, D] of `encode_int4_block`."""
    number = torch.cat([code & 15, code >> 4], -1).float()
    step, zero = scale.float().unsqueeze(-2).unbind(-3)
    return (number * step + zero).to(dtype)


def _levels(x: Tensor, dim: int, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers from 0 to `most`, and along a dimension the step between them and what 0 is."""
    zero = x.amin(dim, keepdim=True).clamp(-FP16_MOST, FP16_MOST).half()
    step = ((x.amax(dim, keepdim=True) - zero.float()) / most).clamp(min=FP16_LEAST).half()
    number = ((x - zero.float()) / step.float()).round().clamp(0, most).to(torch.uint8)
    return number, step.squeeze(dim), zero.squeeze(dim)


def _pack_int2(number: Tensor) -> Tensor:
    a, b, c, d = number.chunk(4, -1)
    return a | b << 2 | c << 4 | d << 6


def decode(code: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The vectors [..., D] of codes and scales [...]."""
    return (numbers(code).float() * scale.unsqueeze(-1)).to(dtype)


def numbers(x: Tensor) -> Tensor:
    """Vectors or codes as numbers: of codes the direction alone."""
    return x.view(FP8) if x.dtype == torch.uint8 else x
