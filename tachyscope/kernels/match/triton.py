"""Find every new entry's most alike older one on a GPU, without the matrix of cosines (Triton)."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tachyscope.kernels.codes import numbers
from tachyscope.kernels.device import has_large_smem
from tachyscope.kernels.launch import launch

# below any cosine times a norm, and finite: bits are put into it
LOWEST = tl.constexpr(-3e38)
# as torch's normalize: what a norm is at least
SMALLEST = tl.constexpr(1e-12)


class Setting(NamedTuple):
    """How the kernel is built and launched; the result does not depend on it."""

    rows: int = 128  # entries that look, of a program's tile
    columns: int = 128  # older entries met at once
    warps: int = 8
    stages: int = 2  # of the pipeline that loads them
    registers: int = 128  # of a thread: two programs share a multiprocessor, one adds, one compares
    span: int = 4096  # older entries that one program meets in all
    use_tma: bool = True  # loaded by the copy engine (TMA), else by pointers


def best_older(
    vectors: Sequence[Tensor], first: int, shared: bool = False
) -> tuple[Tensor, Tensor]:
    """`best_older` by one vector of each entry, of one head."""
    (k,) = vectors
    return match(k, first)


def match(k: Tensor, first: int, setting: Setting | None = None) -> tuple[Tensor, Tensor]:
    """`best_older` of keys k [B, H, n, D] as they are: cosine in float32 and index, both [B, H, m].

    Cosines are compared to within 2^-16 of their size (a column's number takes the lowest bits),
    the oldest first where they agree so far; the winner's is then measured in float32.
    """
    s = setting or Setting(use_tma=has_large_smem(k.device))
    rows, heads, n, width = k.shape
    looking, tiles = n - first, triton.cdiv(n - first, s.rows)
    parts = triton.cdiv(n, s.span)
    fine: dict[str, Any] = {"dtype": torch.float32, "device": k.device}
    scale = torch.empty(rows * heads, n, **fine)
    best = torch.empty(parts, rows * heads, looking, **fine)
    index = torch.empty_like(best, dtype=torch.int32)
    cosine = torch.empty(rows, heads, looking, **fine)
    partner = torch.empty_like(cosine, dtype=torch.int64)
    if k.dtype.itemsize == 1:
        # codes are multiplied as bfloat16, which holds them; the interpreter multiplies none.
        # Converted in the kernel, that has the product wait: 19 ms more a chunk at Wan 1.3B
        k = numbers(k).to(torch.bfloat16 if k.is_cuda else torch.float32)
    strides = k.stride()[:3]
    table = _tma_table(k, s.columns) if s.use_tma else None
    launch(
        _norms,
        (triton.cdiv(n, 64), rows * heads),
        k,
        scale,
        *strides,
        heads,
        n,
        D=width,
        N=64,
        num_warps=4,
    )
    launch(
        _match, (tiles, parts, rows * heads),
        k, table or k, scale, best, index, *strides, heads, n, first, -s.columns,
        D=width, M=s.rows, N=s.columns, USE_TMA=table is not None,
        num_warps=s.warps, num_stages=s.stages, maxnreg=s.registers,
    )  # fmt: skip
    launch(
        _settle, (triton.cdiv(looking, 32), rows * heads),
        k, best, index, cosine, partner, *strides, heads, n, first, parts,
        D=width, M=32, num_warps=4,
    )  # fmt: skip
    return cosine, partner


def _tma_table(k: Tensor, columns: int) -> TensorDescriptor | None:
    """All heads' keys as rows of one table, where they lie so; a tile may run into the next head's.

    The kernel makes nothing of those.
    """
    b, h, n, _ = k.stride()
    if b % n or h % n:
        return None
    rows = 1 + sum((size - 1) * step // n for size, step in zip(k.shape, (b, h, n), strict=False))
    table = k.as_strided((rows, k.shape[3]), (n, 1))
    return TensorDescriptor.from_tensor(table, [columns, k.shape[3]])


def measure(
    vectors: Sequence[Tensor], partner: Tensor, alike: Tensor, shared: bool = False
) -> None:
    """`measure` by one vector of each entry, of one head."""
    (k,) = vectors
    rows, heads, _, width = k.shape
    m, k = alike.shape[2], numbers(k)
    launch(
        _measure, (triton.cdiv(m, 32), rows * heads),
        k, partner, alike, *k.stride()[:3], *partner.stride()[:2], *alike.stride()[:2], heads, m,
        D=width, M=32, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["heads", "n"])
def _norms(k, scale, k_b, k_h, k_n, heads, n, D: tl.constexpr, N: tl.constexpr):
    """One over each key's norm."""
    row = tl.program_id(1)
    k += (row // heads).to(tl.int64) * k_b + (row % heads).to(tl.int64) * k_h
    at = tl.program_id(0) * N + tl.arange(0, N)
    inside = at < n
    place = at[:, None] * k_n + tl.arange(0, D)[None, :]
    x = tl.load(k + place, mask=inside[:, None], other=0.0).to(tl.float32)
    norm = tl.sqrt(tl.sum(x * x, 1))
    tl.store(scale + row.to(tl.int64) * n + at, 1.0 / tl.maximum(norm, SMALLEST), mask=inside)


@triton.jit(do_not_specialize=["heads", "n", "first", "high"])
def _match(
    k_ptr, k_desc, scale_ptr, best_ptr, index_ptr, k_b, k_h, k_n, heads, n, first, high,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """A tile of entries meets one part of those older: its largest cosines, times own norm."""
    row, part, parts = tl.program_id(2), tl.program_id(1), tl.num_programs(1)
    start_of_head = (row // heads).to(tl.int64) * k_b + (row % heads).to(tl.int64) * k_h
    head = (start_of_head // k_n).to(tl.int32)
    k_ptr += start_of_head
    scale_ptr += row.to(tl.int64) * n
    low = first + tl.program_id(0) * M
    offs_m = low + tl.arange(0, M)
    place = offs_m[:, None] * k_n + tl.arange(0, D)[None, :]
    q = tl.load(k_ptr + place, mask=(offs_m < n)[:, None], other=0.0)
    # the last entry sees all before it, and parts share that evenly
    steps = (tl.minimum(low + M, n) - 1 + N - 1) // N
    start, stop = steps * part // parts, steps * (part + 1) // parts
    whole = tl.maximum(start, tl.minimum(stop, low // N))
    best = tl.full([M], LOWEST, tl.float32)
    index = tl.zeros([M], tl.int32)
    for step in tl.range(start, whole):
        best, index = _best_of_tile(
            q, k_ptr, k_desc, scale_ptr, step * N, offs_m, best, index, k_n, head, n, high,
            False, D, N, USE_TMA,
        )  # fmt: skip
    for step in tl.range(whole, stop):  # here not all are older than all of the tile
        best, index = _best_of_tile(
            q, k_ptr, k_desc, scale_ptr, step * N, offs_m, best, index, k_n, head, n, high,
            True, D, N, USE_TMA,
        )  # fmt: skip
    looking = n - first
    out = (part * tl.num_programs(2) + row).to(tl.int64) * looking + offs_m - first
    tl.store(best_ptr + out, best, mask=offs_m < n)
    tl.store(index_ptr + out, index, mask=offs_m < n)


@triton.jit
def _best_of_tile(
    q, k_ptr, k_desc, scale_ptr, low, offs_m, best, index, k_n, head, n, high,
    EDGE: tl.constexpr, D: tl.constexpr, N: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """The running best after N more older entries, from `low` on."""
    column = tl.arange(0, N)
    offs_n = low + column
    # loaded before the product, to arrive while it runs
    inside = (offs_n < n) if EDGE else (column >= 0)
    k_scale = tl.load(scale_ptr + offs_n, mask=inside, other=0.0)
    if USE_TMA:
        k = k_desc.load([head + low, 0])
    else:
        place = offs_n[:, None] * k_n + tl.arange(0, D)[None, :]
        k = tl.load(k_ptr + place, mask=inside[:, None], other=0.0)
    score = tl.dot(q, k.T) * k_scale[None, :]
    if EDGE:
        score = tl.where(offs_n[None, :] < offs_m[:, None], score, LOWEST)
    # One maximum finds value and column: the column takes the value's lowest bits, so that the
    # older wins where values agree. That is one instruction a value, if all else is known: bits 1
    # and 2 of a column are a thread's own in the product's layout, so they are left for last; and
    # of two constants one must be in a register, so the mask is handed in.
    bits = (score.to(tl.int32, bitcast=True) & high) | ((N - 1 - column) & ~6)[None, :]
    packed = bits.to(tl.float32, bitcast=True).reshape(score.shape[0], N // 8, 4, 2)
    bits = tl.max(tl.max(packed, 3), 1).to(tl.int32, bitcast=True)
    packed = (bits | (6 - 2 * tl.arange(0, 4))[None, :]).to(tl.float32, bitcast=True)
    won = tl.max(packed, 1).to(tl.int32, bitcast=True)
    value = (won & -N).to(tl.float32, bitcast=True)
    better = value > best
    return tl.where(better, value, best), tl.where(better, low + N - 1 - (won & (N - 1)), index)


@triton.jit(do_not_specialize=["heads", "n", "first", "parts"])
def _settle(
    k, best, index, cosine, partner, k_b, k_h, k_n, heads, n, first, parts,
    D: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """The best of all parts, with its cosine in float32."""
    row = tl.program_id(1)
    k += (row // heads).to(tl.int64) * k_b + (row % heads).to(tl.int64) * k_h
    count = n - first
    place = tl.program_id(0) * M + tl.arange(0, M)
    inside = place < count
    mine = first + place
    top = tl.full([M], LOWEST, tl.float32)
    at = tl.zeros([M], tl.int32)
    for part in range(parts):
        out = (part * tl.num_programs(1) + row).to(tl.int64) * count + place
        value = tl.load(best + out, mask=inside, other=LOWEST)
        older = tl.load(index + out, mask=inside, other=0)
        better = value > top
        top, at = tl.where(better, value, top), tl.where(better, older, at)
    # an entry of zeros may have lost its column: any older one is as good
    at = tl.maximum(tl.minimum(at, mine - 1), 0)
    likeness = _cosine(k, mine, at, k_n, inside, D)
    out = row.to(tl.int64) * count + place
    tl.store(cosine + out, tl.where(mine > 0, likeness, -float("inf")), mask=inside)
    tl.store(partner + out, at.to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["heads", "m"])
def _measure(
    k, partner, alike, k_b, k_h, k_n, p_b, p_h, a_b, a_h, heads, m,
    D: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    b, h = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    mine = tl.program_id(0) * M + tl.arange(0, M)
    inside = mine < m
    theirs = tl.load(partner + b * p_b + h * p_h + mine, mask=inside, other=0).to(tl.int32)
    likeness = _cosine(k + b * k_b + h * k_h, mine, theirs, k_n, inside, D)
    likeness = tl.where(mine > 0, likeness, -float("inf"))
    tl.store(alike + b * a_b + h * a_h + mine, likeness, mask=inside)


@triton.jit
def _cosine(k, mine, theirs, k_n, inside, D: tl.constexpr):
    d = tl.arange(0, D)[None, :]
    x = tl.load(k + mine[:, None] * k_n + d, mask=inside[:, None], other=0.0).to(tl.float32)
    y = tl.load(k + theirs[:, None] * k_n + d, mask=inside[:, None], other=0.0).to(tl.float32)
    norms = tl.maximum(tl.sqrt(tl.sum(x * x, 1)), SMALLEST)
    norms *= tl.maximum(tl.sqrt(tl.sum(y * y, 1)), SMALLEST)
    return tl.sum(x * y, 1) / norms
