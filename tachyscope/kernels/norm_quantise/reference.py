"""The definitions of what stands between linears, in float64; codes as the numbers they stand for.

A code is the nearest float8 of its number over the row's scale, which is the row's largest number
over 448. So it is off by a sixteenth of itself at most, or by 2^-10 of a scale.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tachyscope.kernels.norm_quantise.torch import FP8, LARGEST, LEAST


def gelu_reference(x: Tensor) -> Tensor:
    x = x.double()
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def add_reference(x: Tensor, y: Tensor, gate: Tensor | None = None) -> Tensor:
    """x [B, S, W] + y · gate [B, F, W], for each frame's rows."""
    out, frames = x.double().clone(), 1 if gate is None else gate.shape[1]
    size = x.shape[1] // frames
    for f in range(frames):
        rows = slice(f * size, (f + 1) * size)
        factor = 1.0 if gate is None else gate[:, f : f + 1].double()
        out[:, rows] += y[:, rows].double() * factor
    return out


def norm_reference(
    x: Tensor, shift: Tensor, scale: Tensor, eps: float, plus_one: bool = True
) -> Tensor:
    """norm(x) · (1 + scale) + shift, or · scale, for one shift and scale a frame [B, F, W]."""
    x = x.double()
    centred = x - x.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    out, size = torch.empty_like(x), x.shape[1] // shift.shape[1]
    for f in range(shift.shape[1]):
        rows = slice(f * size, (f + 1) * size)
        factor = scale[:, f : f + 1].double() + plus_one
        out[:, rows] = normed[:, rows] * factor + shift[:, f : f + 1].double()
    return out


def quantise_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers [..., W] that codes of x stand for, and each row's scale [..., 1]."""
    scale = x.double().abs().amax(-1, keepdim=True).clamp(min=LEAST) / LARGEST
    return (x.double() / scale).float().to(FP8).double() * scale, scale
