"""Between linears by stock torch, in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST, LEAST = torch.finfo(FP8).max, 1e-12


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Float8 codes [..., W] of x, and of each row a scale [..., 1]."""
    wide = x.float()
    most = wide.abs().amax(-1, keepdim=True).clamp(min=LEAST)
    # a number over a tensor would be its reciprocal, rounded, times the number
    return (wide * (torch.full_like(most, LARGEST) / most)).to(FP8), most * (1 / LARGEST)


def gelu_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantise` of gelu(x), by its tanh form."""
    return quantise(F.gelu(x.float(), approximate="tanh"))


def norm_quantise(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`quantise` of norm(x) · (1 + scale) + shift, x [B, S, W], one shift and scale a frame."""
    return quantise(_modulated(x.float(), shift, scale, eps))


def add_norm(
    x: Tensor, y: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """x + y · gate, and norm(of that sum) · weight + bias."""
    total = add_gated(x, y, gate)
    normed = F.layer_norm(total.float(), x.shape[-1:], weight.float(), bias.float(), eps)
    return total, normed.to(x.dtype)


def add_gated(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """x + y · gate, one gate a frame [B, F, W]."""
    wide = x.float() + y.float() * by_row(gate, x)
    return wide.to(x.dtype)


def by_row(one_a_frame: Tensor, x: Tensor) -> Tensor:
    """[B, F, W] as [B, S, W] of x."""
    return one_a_frame.float().repeat_interleave(x.shape[1] // one_a_frame.shape[1], 1)


def _modulated(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    normed = F.layer_norm(x, x.shape[-1:], eps=eps)
    return torch.addcmul(by_row(shift, x), normed, 1 + by_row(scale, x))
