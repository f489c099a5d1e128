"""Count the queries that are nearest to each prompt token, on a GPU, keeping no score (Triton)."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tachyscope.kernels.launch import launch

# below any score, empty slots' among them, and finite
LOWEST = tl.constexpr(-3e38)
# as the codes' definition has it: what the largest channel is at least
SMALLEST = tl.constexpr(1e-12)


def count_nearest(q: Tensor, k: Tensor, log_count: Tensor) -> Tensor:
    """How many of q [B, H, S, D] score best, by int8 and log_count [B, H, n], at each of k.

    k [B, H, n, D]; the counts are int32 [B, H, n]. Codes are multiplied as numbers of q's type,
    which holds them exactly, and summed in float32, which holds the sums.
    """
    rows, heads, tokens, width = q.shape
    counts = torch.zeros(rows, heads, k.shape[2], dtype=torch.int32, device=q.device)
    size = 128
    launch(
        _count, (triton.cdiv(tokens, size), rows * heads),
        q, k, log_count, counts, *q.stride()[:3], *k.stride()[:3], *log_count.stride(),
        heads, tokens, k.shape[2], 1 / math.sqrt(width),
        D=width, M=size, N=32, num_warps=8,
    )  # fmt: skip
    return counts


@triton.jit(do_not_specialize=["heads", "tokens", "n"])
def _count(
    q_ptr, k_ptr, log_count_ptr, counts_ptr, q_b, q_h, q_n, k_b, k_h, k_n, w_b, w_h, w_n,
    heads, tokens, n, root, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A tile of queries meets all tokens; then each token's count grows by those it won."""
    row = tl.program_id(1)
    b, h = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    k_ptr, log_count_ptr, counts_ptr = (
        k_ptr + b * k_b + h * k_h,
        log_count_ptr + b * w_b + h * w_h,
        counts_ptr + row * n,
    )
    offs_m = tl.program_id(0) * M + tl.arange(0, M)
    q, q_scale = _int8(q_ptr + b * q_b + h * q_h, offs_m, q_n, tokens, D)
    best = tl.full([M], LOWEST, tl.float32)
    index = tl.zeros([M], tl.int32)
    for low in range(0, n, N):
        offs_n = low + tl.arange(0, N)
        k, k_scale = _int8(k_ptr, offs_n, k_n, n, D)
        bias = tl.load(log_count_ptr + offs_n * w_n, mask=offs_n < n, other=-float("inf"))
        scores = tl.dot(q, k.T) * (q_scale * root)[:, None] * k_scale[None, :]
        scores = tl.where(bias[None, :] > -float("inf"), scores + bias[None, :], LOWEST)
        tile_best, place = tl.max(scores, 1, return_indices=True)
        better = tile_best > best
        best, index = tl.where(better, tile_best, best), tl.where(better, low + place, index)
    index = tl.where((offs_m < tokens) & (best > LOWEST), index, -1)
    for low in range(0, n, N):
        offs_n = low + tl.arange(0, N)
        won = tl.sum((index[:, None] == offs_n[None, :]).to(tl.int32), 0)
        tl.atomic_add(counts_ptr + offs_n, won, mask=won > 0, sem="relaxed")


@triton.jit
def _int8(x, offs, stride, n, D: tl.constexpr):
    """Vectors as whole numbers up to 127, in their own type, and one scale each."""
    place = offs[:, None] * stride + tl.arange(0, D)[None, :]
    vector = tl.load(x + place, mask=(offs < n)[:, None], other=0.0)
    wide = vector.to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(wide), 1), SMALLEST) / 127
    return tl.floor(wide / scale[:, None] + 0.5).to(vector.dtype), scale
