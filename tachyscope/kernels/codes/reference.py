"""The definition of codes, one vector at a time in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from tachyscope.kernels.codes.torch import (
    FP8,
    FP16_LEAST,
    FP16_MOST,
    LARGEST,
)


def encode_reference(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of x [B, H, n, D] and their scales [B, H, n]."""
    code, scale = torch.empty(x.shape, dtype=dtype), torch.empty(x.shape[:3])
    for at in torch.cartesian_prod(*map(torch.arange, x.shape[:3])).unbind():
        vector = x[*at].double()
        scale[*at] = vector.abs().max().clamp(min=1e-12) / LARGEST[dtype]
        nearest = vector / scale[*at].double()
        code[*at] = nearest.round() if dtype == torch.int8 else nearest.to(FP8).view(dtype)
    return code, scale


def encode_int4_block_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers from 0 to 15 of entries x [n, D], and a step and a zero a channel [2, D]."""
    number, scale = torch.empty(x.shape, dtype=torch.float64), torch.empty(2, x.shape[1])
    for i, channel in enumerate(x.float().unbind(1)):
        zero = channel.min().clamp(-FP16_MOST, FP16_MOST).half().float()
        step = ((channel.max() - zero) / 15).clamp(min=FP16_LEAST).half().float()
        scale[0, i], scale[1, i] = step, zero
        number[:, i] = ((channel - zero) / step).round().clamp(0, 15).double()
    return number, scale.double()


def decode_packed_reference(
    code: Tensor, scale: Tensor, bits: int, group: int = 1, first: int = 0
) -> Tensor:
    """The vectors [B, H, n, D] of codes that share bytes, as `decode_packed` has them."""
    parts, (*rows, width) = 8 // bits, code.shape
    out = torch.empty(*rows, parts * width, dtype=torch.float64)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, rows)).tolist():
        steps, zeros = scale[b, h, (first + i) // group].double().chunk(2)
        byte = code[b, h, i].int()
        number = torch.cat([byte // 2 ** (bits * part) % 2**bits for part in range(parts)]).double()
        size = parts * width // len(steps)
        out[b, h, i] = number * steps.repeat_interleave(size) + zeros.repeat_interleave(size)
    return out
