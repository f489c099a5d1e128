"""The online softmax of flash attention, and joining answers over parts of the entries (Triton).

p = exp(scores - m_i), l_i the running sum of p, acc the running sum of p v, alpha what both shrink
by when the running maximum m_i rises; lse is the logarithm of a part's sum, to base 2.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))
# a running maximum's start: finite, so that the difference to minus infinity is no NaN
LOWEST = tl.constexpr(-1e30)


@triton.jit
def online_softmax(scores, scale, m_i, l_i, acc):
    """One step over scores · scale: p, and m_i, l_i and acc after it."""
    m_new = tl.maximum(m_i, tl.max(scores, 1) * scale)
    p = tl.exp2(scores * (scale * LOG2E) - (m_new * LOG2E)[:, None])
    alpha = tl.exp2((m_i - m_new) * LOG2E)
    return p, m_new, l_i * alpha + tl.sum(p, 1), acc * alpha[:, None]


@triton.jit(do_not_specialize=["heads", "queries"])
def join_parts(
    parts_ptr, lse_ptr, out_ptr, o_b, o_h, o_s, heads, queries,
    PARTS: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """One answer from those over parts of the entries, by the logarithm of each part's sum."""
    row, stride = tl.program_id(1), tl.num_programs(1).to(tl.int64) * queries
    offs_m, offs_d = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, D)[None, :]
    mask_m = offs_m < queries
    at = row.to(tl.int64) * queries + offs_m
    m_i = tl.full([M], LOWEST * 2, tl.float32)
    for part in tl.static_range(PARTS):
        m_i = tl.maximum(m_i, tl.load(lse_ptr + part * stride + at, mask=mask_m, other=0.0))
    l_i = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for part in tl.static_range(PARTS):
        alpha = tl.exp2(tl.load(lse_ptr + part * stride + at, mask=mask_m, other=0.0) - m_i)
        part_ptrs = parts_ptr + (part * stride + at)[:, None] * D + offs_d
        l_i += alpha
        acc += alpha[:, None] * tl.load(part_ptrs, mask=mask_m[:, None], other=0.0)
    out_ptr += (row // heads).to(tl.int64) * o_b + (row % heads).to(tl.int64) * o_h
    acc = (acc / l_i[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offs_m.to(tl.int64)[:, None] * o_s + offs_d, acc, mask=mask_m[:, None])


@triton.jit(do_not_specialize=["tiles", "heads", "queries", "whole", "left", "programs", "units"])
def join_shares(
    parts_ptr, lse_ptr, out_ptr, o_b, o_h, o_s, tiles, heads, queries, whole, left, programs, units,
    D: tl.constexpr, T: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """One tile's answer from the programs that shared its entries (see `attention/hopper.py`)."""
    mine = tl.program_id(0)
    each = whole + mine
    row, tile = each // tiles, each % tiles
    offs_t = tl.program_id(1) * M + tl.arange(0, M)
    offs_m, offs_d = tile * T + offs_t, tl.arange(0, D)[None, :]
    # the shares that hold the tile's first unit and its last
    low = ((mine * units + 1) * programs - 1) // (left * units)
    high = ((mine + 1) * units * programs - 1) // (left * units)
    m_i = tl.full([M], -2e30, tl.float32)
    l_i = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for part in range(low, high + 1):
        place = (part + mine) * T + offs_t
        lse = tl.load(lse_ptr + place)
        m_new = tl.maximum(m_i, lse)
        alpha, beta = tl.exp2(m_i - m_new), tl.exp2(lse - m_new)
        l_i = l_i * alpha + beta
        acc *= alpha[:, None]
        acc += beta[:, None] * tl.load(parts_ptr + place[:, None] * D + offs_d)
        m_i = m_new
    b, h = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    place = b * o_b + h * o_h + offs_m.to(tl.int64)[:, None] * o_s + offs_d
    acc = (acc / l_i[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place, acc, mask=(offs_m < queries)[:, None])
