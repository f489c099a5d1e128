"""Count the queries that are nearest to each prompt token, on a GPU, keeping no score (Triton)."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    if q.is_meta:
        return counts
    size = 128
    _count[triton.cdiv(tokens, size), rows * heads](
        q, k, log_count, counts, *q.stride()[:3], *k.stride()[:3], *log_count.stride(),
        heads, tokens, k.shape[2], 1 / math.sqrt(width),
        D=width, M=size, N=32, num_warps=8,
    )  # fmt: skip
    return counts


@triton.jit(do_not_specialize=["heads", "tokens", "n"])
def _count(
    q, k, log_count, counts, q_b, q_h, q_n, k_b, k_h, k_n, w_b, w_h, w_n, heads, tokens, n, root,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A tile of queries meets all tokens; then each token's count grows by those it won."""
    row = tl.program_id(1)
    b, h = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    k, log_count, counts = k + b * k_b + h * k_h, log_count + b * w_b + h * w_h, counts + row * n
    mine = tl.program_id(0) * M + tl.arange(0, M)
    code, scale = _coded(q + b * q_b + h * q_h, mine, q_n, tokens, D)
    top = tl.full([M], LOWEST, tl.float32)
    at = tl.zeros([M], tl.int32)
    for low in range(0, n, N):
        token = low + tl.arange(0, N)
        theirs, their_scale = _coded(k, token, k_n, n, D)
        weight = tl.load(log_count + token * w_n, mask=token < n, other=-float("inf"))
        score = tl.dot(code, theirs.T) * (scale * root)[:, None] * their_scale[None, :]
        score = tl.where(weight[None, :] > -float("inf"), score + weight[None, :], LOWEST)
        best, place = tl.max(score, 1, return_indices=True)
        better = best > top
        top, at = tl.where(better, best, top), tl.where(better, low + place, at)
    at = tl.where((mine < tokens) & (top > LOWEST), at, -1)
    for low in range(0, n, N):
        token = low + tl.arange(0, N)
        won = tl.sum((at[:, None] == token[None, :]).to(tl.int32), 0)
        tl.atomic_add(counts + token, won, mask=won > 0, sem="relaxed")


@triton.jit
def _coded(x, at, stride, n, D: tl.constexpr):
    """Vectors as whole numbers up to 127, in their own type, and one scale each."""
    place = at[:, None] * stride + tl.arange(0, D)[None, :]
    vector = tl.load(x + place, mask=(at < n)[:, None], other=0.0)
    wide = vector.to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(wide), 1), SMALLEST) / 127
    return tl.floor(wide / scale[:, None] + 0.5).to(vector.dtype), scale
