"""Codes by stock torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
# the largest code
LARGEST = {torch.int8: 127.0, torch.uint8: torch.finfo(FP8).max}


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


def decode(code: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The vectors [..., D] of codes and scales [...]."""
    return (numbers(code).float() * scale.unsqueeze(-1)).to(dtype)


def numbers(x: Tensor) -> Tensor:
    """Vectors or codes as numbers: of codes the direction alone."""
    return x.view(FP8) if x.dtype == torch.uint8 else x
