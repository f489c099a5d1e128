"""Codes by stock torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
# the largest code
LARGEST = {torch.int8: 127.0, torch.uint8: torch.finfo(FP8).max}
CHANNELS = 32  # of an entry that share a step and a zero
FP16_LEAST = 2.0**-14  # the least step that float16 holds exactly
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


def channel_groups(width: int) -> int:
    """Groups of an entry's channels that share a step and a zero."""
    return width // CHANNELS if width % CHANNELS == 0 else 1


def encode_packed(x: Tensor, bits: int, group: int = 1) -> tuple[Tensor, Tensor]:
    """x [B, H, n, D] as `bits` a channel [B, H, n, bits D / 8], and steps and zeros in float16.

    These are of every `group` entries for each channel [B, H, n / group, 2 D], or where that is 1
    of every entry for 32 channels [B, H, n, 2 D / 32], steps before zeros: a key's channel lies off
    zero by much more than it varies among entries. A byte's channels lie as far apart as there are
    bytes, the first in its lowest bits.
    """
    if group > 1:
        number, step, zero = _levels(x.float().unflatten(2, (-1, group)), bits, 3)
        number = number.flatten(2, 3)
    else:
        groups = channel_groups(x.shape[3])
        number, step, zero = _levels(x.float().unflatten(3, (groups, -1)), bits, 4)
        number = number.flatten(3, 4)
    return _pack(number, bits), torch.cat([step, zero], -1)


def decode_packed(
    code: Tensor, scale: Tensor, out: Tensor, bits: int, group: int = 1, first: int = 0
) -> None:
    """Write the vectors [B, H, n, D] of `encode_packed` to `out`.

    `first` of those entries that share the first row of scales stand before.
    """
    if group > 1:
        index = torch.arange(first, first + code.shape[2], device=code.device) // group
        scale = scale.index_select(2, index)
    step, zero = scale.float().chunk(2, -1)
    number = _unpack(code, bits).unflatten(-1, (step.shape[-1], -1))
    out.copy_((number * step.unsqueeze(-1) + zero.unsqueeze(-1)).flatten(-2))


def encode_int4_block(x: Tensor) -> tuple[Tensor, Tensor]:
    """Entries x [..., n, D] as 4 bits a channel [..., n, D / 2], and of all of them a step and a
    zero for each channel [..., 2, D] of float16.

    A key's channel lies off zero by much more than it varies among entries.
    """
    number, step, zero = _levels(x.float(), 4, -2)
    return _pack(number, 4), torch.stack([step, zero], -2)


def decode_int4_block(code: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The entries [..., n, D] of `encode_int4_block`."""
    number = _unpack(code, 4)
    step, zero = scale.float().unsqueeze(-2).unbind(-3)
    return (number * step + zero).to(dtype)


def _levels(x: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """x as numbers of `bits` bits, and along a dimension their step and the value of 0."""
    most = 2**bits - 1
    zero = x.amin(dim, keepdim=True).clamp(-FP16_MOST, FP16_MOST).half()
    step = ((x.amax(dim, keepdim=True) - zero.float()) / most).clamp(min=FP16_LEAST).half()
    number = ((x - zero.float()) / step.float()).round().clamp(0, most).to(torch.uint8)
    return number, step.squeeze(dim), zero.squeeze(dim)


def _pack(number: Tensor, bits: int) -> Tensor:
    code, *rest = number.chunk(8 // bits, -1)
    for i, part in enumerate(rest, 1):
        code = code | part << bits * i
    return code


def _unpack(code: Tensor, bits: int) -> Tensor:
    return torch.cat([code >> i & (2**bits - 1) for i in range(0, 8, bits)], -1).float()


def decode(code: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The vectors [..., D] of codes and scales [...]."""
    return (numbers(code).float() * scale.unsqueeze(-1)).to(dtype)


def decode_into(code: Tensor, scale: Tensor, out: Tensor) -> None:
    """Write the vectors [B, H, n, D] of codes and scales [B, H, n] to `out`."""
    out.copy_(decode(code, scale, out.dtype))


def numbers(x: Tensor) -> Tensor:
    """Vectors or codes as numbers: of codes the direction alone."""
    return x.view(FP8) if x.dtype == torch.uint8 else x
