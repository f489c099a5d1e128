"""Cheap codes of vectors, for finding near ones without scoring them all."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from tachyscope.kernels.codes import numbers


@functools.cache
def planes(bits: int, dim: int, device: torch.device) -> Tensor:
    """Normals of random hyperplanes [dim, bits]: the same everywhere, so buckets are shared."""
    with torch.inference_mode(False):
        # fewer bits are the first of more, so that coarse and fine buckets nest
        seeded = torch.Generator().manual_seed(0)
        draw = torch.randn(max(bits, 64), dim, generator=seeded, dtype=torch.float32)
        return draw[:bits].T.contiguous().to(device)


def signs(x: Tensor, bits: int) -> Tensor:
    """On which side of each plane x [..., D] lies: ±1 [..., bits]."""
    side = numbers(x).float() @ planes(bits, x.shape[-1], x.device) >= 0
    return side.float() * 2 - 1


def buckets(x: Tensor, bits: int) -> Tensor:
    """The sign pattern of x [..., D] as one number."""
    powers = 2 ** torch.arange(bits - 1, -1, -1, device=x.device)
    return ((signs(x, bits) > 0).long() * powers).sum(-1)


def order_of(number: Tensor, most: int) -> Tensor:
    """Indices that bring number [B, H, n], each under `most`, in order; equal ones stay in theirs.

    All heads are sorted at once: a GPU would else take them one after the other.
    """
    rows, heads, n = number.shape
    head = torch.arange(rows * heads, device=number.device).view(rows, heads, 1)
    narrow = torch.int16 if rows * heads * most <= 2**15 else torch.int32
    order = (head * most + number).to(narrow).flatten().argsort(stable=True)
    return order.view(rows, heads, n) - head * n


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] as int8 and a scale [..., 1] a vector."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / 127
    return (x / scale).round().to(torch.int8), scale


def lsh_scores(q: Tensor, sign: Tensor, norm: Tensor) -> Tensor:
    """Estimated q·k / √D of queries [..., S, D] and keys known by signs [..., n, bits], norms.

    Two vectors at angle a fall on different sides of a plane with probability a / π.
    """
    bits = sign.shape[-1]
    agree = signs(q, bits) @ sign.mT / bits
    cosine = (math.pi / 2 * (1 - agree)).cos()
    return (
        cosine * q.float().norm(dim=-1, keepdim=True) * norm.unsqueeze(-2) / math.sqrt(q.shape[-1])
    )


def int8_scores(q: Tensor, code: Tensor, scale: Tensor) -> Tensor:
    """Estimated q·k / √D of queries [..., S, D] and keys known by int8 [..., n, D], scales."""
    mine, my_scale = quantise(q)
    exact = mine.float() @ code.float().mT  # sums of int8 products are whole in float32
    return exact * my_scale * scale.squeeze(-1).unsqueeze(-2) / math.sqrt(q.shape[-1])
