"""Lloyd's iterations on a GPU, without the matrix of distances (Triton)."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tachyscope.kernels.hashing import order_of
from tachyscope.kernels.launch import launch

# vectors and centroids that a program compares at once, and vectors that it adds up
ROWS, COLUMNS, ADDED = 128, 64, 32


def nearest(x: Tensor, centroids: Tensor) -> Tensor:
    """The nearest centroid [B, H, K, D] of each of x [B, H, n, D]: [B, H, n]."""
    rows, heads, n, width = x.shape
    near = centroids.to(x.dtype).contiguous()  # as tensor cores multiply them
    half = near.float().square().sum(-1) / 2
    label = torch.empty(rows, heads, n, dtype=torch.int64, device=x.device)
    launch(
        _nearest, (triton.cdiv(n, ROWS), rows * heads),
        x, near, half, label, *x.stride()[:3], heads, n, near.shape[2],
        D=width, M=ROWS, N=COLUMNS, num_warps=8,
    )  # fmt: skip
    return label


def sum_clusters(x: Tensor, weight: Tensor, label: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Sums [B, H, K, D] of the vectors of each cluster, `weight` times each, and their weights."""
    rows, heads, n, width = x.shape
    order = order_of(label, count)
    # where in that order each cluster begins, and the last one ends
    number = torch.arange(count + 1, device=x.device).expand(rows, heads, -1).contiguous()
    start = torch.searchsorted(label.gather(2, order), number)
    fine: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
    total = torch.empty(rows, heads, count, width, **fine)
    size = torch.empty(rows, heads, count, **fine)
    launch(
        _sum_clusters, (count, rows * heads),
        x, weight.contiguous(), order, start, total, size, *x.stride()[:3], heads, n, count,
        D=width, N=ADDED, num_warps=4,
    )  # fmt: skip
    return total, size


@triton.jit(do_not_specialize=["heads", "n", "count"])
def _nearest(
    x, near, half, label, x_b, x_h, x_n, heads, n, count,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One tile of vectors against all centroids; the first of those equally near."""
    head = tl.program_id(1)
    x += (head // heads).to(tl.int64) * x_b + (head % heads).to(tl.int64) * x_h
    near += head.to(tl.int64) * count * D
    half += head * count
    at = tl.program_id(0) * M + tl.arange(0, M)
    dim = tl.arange(0, D)
    q = tl.load(x + at[:, None] * x_n + dim[None, :], mask=at[:, None] < n, other=0.0)
    best = tl.full((M,), float("-inf"), tl.float32)
    index = tl.zeros((M,), tl.int32)
    for start in range(0, count, N):
        column = start + tl.arange(0, N)
        inside = column < count
        k = tl.load(near + column[None, :] * D + dim[:, None], mask=inside[None, :], other=0.0)
        score = tl.dot(q, k) - tl.load(half + column, mask=inside, other=0.0)[None, :]
        score = tl.where(inside[None, :], score, float("-inf"))
        top = tl.max(score, 1)
        first = tl.min(tl.where(score == top[:, None], column[None, :], count), 1)
        index = tl.where(top > best, first, index)
        best = tl.maximum(best, top)
    tl.store(label + head.to(tl.int64) * n + at, index.to(tl.int64), mask=at < n)


@triton.jit(do_not_specialize=["heads", "n", "count"])
def _sum_clusters(
    x, weight, order, start, total, size, x_b, x_h, x_n, heads, n, count,
    D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One cluster of one head, its vectors in their order."""
    head = tl.program_id(1)
    cluster = tl.program_id(0)
    x += (head // heads).to(tl.int64) * x_b + (head % heads).to(tl.int64) * x_h
    weight += head.to(tl.int64) * n
    order += head.to(tl.int64) * n
    start += head * (count + 1) + cluster
    stop = tl.load(start + 1)
    dim = tl.arange(0, D)
    acc = tl.zeros((D,), tl.float32)
    heavy = tl.zeros((N,), tl.float32)
    for first in range(tl.load(start), stop, N):
        at = first + tl.arange(0, N)
        inside = at < stop
        entry = tl.load(order + at, mask=inside, other=0)
        times = tl.load(weight + entry, mask=inside, other=0.0)
        v = tl.load(x + entry[:, None] * x_n + dim[None, :], mask=inside[:, None], other=0.0)
        acc += tl.sum(v.to(tl.float32) * times[:, None], 0)
        heavy += times
    place = head.to(tl.int64) * count + cluster
    tl.store(total + place * D + dim, acc)
    tl.store(size + place, tl.sum(heavy, 0))
