"""Index past entries by blocks on a GPU (Triton)."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tachyscope.kernels.block_index.torch import Codes, mean_queries
from tachyscope.kernels.codes import Past, numbers
from tachyscope.kernels.device import MEANS
from tachyscope.kernels.hashing import planes
from tachyscope.kernels.launch import launch
from tachyscope.kernels.online_softmax import LOG2E, LOWEST


def buckets(x: Tensor, bits: int) -> Tensor:
    """`buckets` as int32, with no wide copy of x."""
    rows, heads, n, width = x.shape
    out = torch.empty(rows, heads, n, dtype=torch.int32, device=x.device)
    if n == 0:
        return out
    launch(
        _buckets, (triton.cdiv(n, 64), rows * heads),
        numbers(x), planes(bits, width, x.device), out, *x.stride()[:3], heads, n,
        D=width, BITS=bits, N=64, num_warps=4,
    )  # fmt: skip
    return out


def encode_blocks(past: Past, log_count: Tensor, block: int, codes: Codes, first: int = 0) -> None:
    """`encode_blocks` by int8 means, of all blocks: it is one launch."""
    rows, heads, places = log_count.shape
    code, scale, weight = codes
    k, size = numbers(past.k), triton.next_power_of_2(block)
    k_scale = log_count if past.k_scale is None else past.k_scale
    launch(
        _encode, (places // block, rows * heads),
        k, k_scale, log_count, code, scale, weight, *k.stride()[:3], *k_scale.stride()[:2],
        *log_count.stride()[:2], code.shape[2], k.shape[2], heads,
        CODED=past.k_scale is not None, D=k.shape[3], BLOCK=block, N=size,
        num_warps=max(1, size // 16),
    )  # fmt: skip


def block_mass(q: Tensor, codes: Codes, blocks: int, tile: int) -> Tensor:
    """`block_mass` by int8 codes: the scores are never written."""
    code, scale, weight = codes
    rows, heads, queries, width = q.shape
    tiles = triton.cdiv(queries, tile)
    out = torch.empty(rows, heads, tiles, blocks, dtype=torch.float32, device=q.device)
    launch(
        _mass, (tiles, rows * heads),
        q, code, scale, weight, out, *q.stride()[:3], code.shape[2], heads,
        heads // code.shape[1], queries, blocks, 1 / math.sqrt(width),
        D=width, M=tile, N=64, num_warps=max(1, tile // 16),
    )  # fmt: skip
    return out


def mean_mass(q: Tensor, codes: Codes, blocks: int, tile: int, parts: int = 8) -> Tensor:
    """`mean_mass` by int8 codes: programs share the blocks."""
    q, tile = mean_queries(q, tile // MEANS), MEANS
    code, scale, weight = codes
    rows, heads, queries, width = q.shape
    tiles, size = triton.cdiv(queries, tile), triton.cdiv(triton.cdiv(blocks, parts), 64) * 64
    fine: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    out = torch.empty(rows, heads, tiles, blocks, **fine)
    most, total = (torch.empty(parts, rows * heads, queries, **fine) for _ in range(2))
    for kernel in (_part_sums, _part_mass):
        launch(
            kernel, (triton.cdiv(queries, 64), rows * heads, parts),
            q, code, scale, weight, most, total, out, *q.stride()[:3], code.shape[2], heads,
            heads // code.shape[1], queries, blocks, size, tiles, 1 / math.sqrt(width),
            D=width, M=64, N=64, TILE=tile, PARTS=parts, num_warps=4, num_stages=3,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["heads", "n"])
def _buckets(
    x, normals, out, x_b, x_h, x_s, heads, n,
    D: tl.constexpr, BITS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    at, offs_d = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, D)
    x += (row // heads).to(tl.int64) * x_b + (row % heads).to(tl.int64) * x_h
    inside = at < n
    where = at.to(tl.int64)[:, None] * x_s + offs_d[None, :]
    vector = tl.load(x + where, mask=inside[:, None], other=0.0).to(tl.float32)
    bucket = tl.zeros([N], tl.int32)
    for bit in tl.static_range(BITS):
        bit_set = tl.sum(vector * tl.load(normals + offs_d * BITS + bit)[None, :], 1) >= 0
        bucket = bucket * 2 + bit_set.to(tl.int32)
    tl.store(out + row.to(tl.int64) * n + at, bucket, mask=inside)


@triton.jit(do_not_specialize=["most", "slots", "heads"])
def _encode(
    k, k_scale, log_count, code, scale, weight, k_b, k_h, k_s, s_b, s_h, w_b, w_h, most, slots,
    heads, CODED: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One block of one head."""
    block, row = tl.program_id(0), tl.program_id(1)
    b, h = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    offs_n, offs_d = tl.arange(0, N), tl.arange(0, D)[None, :]
    at = block * BLOCK + offs_n
    live = tl.load(log_count + b * w_b + h * w_h + at, mask=offs_n < BLOCK, other=float("-inf"))
    kept = ((live > float("-inf")) & (at < slots))[:, None]
    keys = k + b * k_b + h * k_h + at.to(tl.int64)[:, None] * k_s + offs_d
    keys = tl.load(keys, mask=kept, other=0.0).to(tl.float32)
    if CODED:
        keys *= tl.load(k_scale + b * s_b + h * s_h + at, mask=at < slots, other=0.0)[:, None]
    members = tl.maximum(tl.sum((live > float("-inf")).to(tl.float32), 0), 1.0)
    centre = tl.sum(keys, 0) / members
    step = tl.maximum(tl.max(tl.abs(centre), 0), 1e-12) / 127
    mine = row.to(tl.int64) * most + block
    tl.store(code + mine * D + tl.arange(0, D), tl.floor(centre / step + 0.5).to(tl.int8))
    tl.store(scale + mine, step)
    top = tl.maximum(tl.max(live, 0), LOWEST)
    total = tl.maximum(tl.sum(tl.exp2((live - top) * LOG2E), 0), 1e-30)
    tl.store(weight + mine, tl.maximum(top + tl.log2(total) / LOG2E, LOWEST))


@triton.jit(do_not_specialize=["heads", "group", "queries", "blocks", "most"])
def _mass(
    q_ptr, code_ptr, scale_ptr, weight_ptr, out_ptr, q_b, q_h, q_s, most,
    heads, group, queries, blocks, factor,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One tile of one head's queries: a pass over all blocks for the softmax's sum, one for it."""
    tile, row = tl.program_id(0), tl.program_id(1)
    b, h = row // heads, row % heads
    head = (b * (heads // group) + h // group).to(tl.int64)
    offs_m = tile * M + tl.arange(0, M)
    mask_m, offs_d = offs_m < queries, tl.arange(0, D)[None, :]
    q_ptr += b.to(tl.int64) * q_b + h.to(tl.int64) * q_h
    q = tl.load(
        q_ptr + offs_m.to(tl.int64)[:, None] * q_s + offs_d, mask=mask_m[:, None], other=0.0
    )
    q = q.to(tl.float32)
    q_scale = tl.maximum(tl.max(tl.abs(q), 1), 1e-12) / 127
    q = tl.floor(q / q_scale[:, None] + 0.5).to(tl.int8)
    q_scale = q_scale * factor
    code_ptr += head * most * D
    scale_ptr += head * most
    weight_ptr += head * most
    m_i = tl.full([M], LOWEST, tl.float32)
    l_i = tl.zeros([M], tl.float32)
    for start in tl.range(0, blocks, N):
        scores = _score(q, q_scale, code_ptr, scale_ptr, weight_ptr, start, blocks, N, D)
        m_new = tl.maximum(m_i, tl.max(scores, 1))
        p = tl.exp2((scores - m_new[:, None]) * LOG2E)
        l_i = l_i * tl.exp2((m_i - m_new) * LOG2E) + tl.sum(p, 1)
        m_i = m_new
    inverse = tl.where(mask_m, 1 / l_i, 0.0)
    out_ptr += (row * tl.num_programs(0) + tile).to(tl.int64) * blocks
    for start in tl.range(0, blocks, N):
        scores = _score(q, q_scale, code_ptr, scale_ptr, weight_ptr, start, blocks, N, D)
        p = tl.exp2((scores - m_i[:, None]) * LOG2E) * inverse[:, None]
        offs_n = start + tl.arange(0, N)
        tl.store(out_ptr + offs_n, tl.sum(p, 0), mask=offs_n < blocks)


@triton.jit
def _quantised(q_ptr, q_b, q_h, q_s, heads, queries, factor, D: tl.constexpr, M: tl.constexpr):
    """A program's queries as int8, and their scales."""
    row = tl.program_id(1)
    offs_m = tl.program_id(0) * M + tl.arange(0, M)
    q_ptr += (row // heads).to(tl.int64) * q_b + (row % heads).to(tl.int64) * q_h
    q = tl.load(
        q_ptr + offs_m.to(tl.int64)[:, None] * q_s + tl.arange(0, D)[None, :],
        mask=(offs_m < queries)[:, None], other=0.0,
    ).to(tl.float32)  # fmt: skip
    q_scale = tl.maximum(tl.max(tl.abs(q), 1), 1e-12) / 127
    return tl.floor(q / q_scale[:, None] + 0.5).to(tl.int8), q_scale * factor


@triton.jit(do_not_specialize=["heads", "group", "queries", "blocks", "most", "size", "tiles"])
def _part_sums(
    q_ptr, code_ptr, scale_ptr, weight_ptr, m_ptr, l_ptr, out_ptr, q_b, q_h, q_s, most,
    heads, group, queries, blocks, size, tiles, factor,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The softmax's maximum and sum over one part of the blocks, of each query."""
    row, part = tl.program_id(1), tl.program_id(2)
    q, q_scale = _quantised(q_ptr, q_b, q_h, q_s, heads, queries, factor, D, M)
    head = (row // heads * (heads // group) + row % heads // group).to(tl.int64)
    code_ptr += head * most * D
    scale_ptr += head * most
    weight_ptr += head * most
    m_i = tl.full([M], LOWEST, tl.float32)
    l_i = tl.zeros([M], tl.float32)
    for start in tl.range(part * size, tl.minimum(blocks, (part + 1) * size), N):
        scores = _score(q, q_scale, code_ptr, scale_ptr, weight_ptr, start, blocks, N, D)
        m_new = tl.maximum(m_i, tl.max(scores, 1))
        l_i = l_i * tl.exp2((m_i - m_new) * LOG2E)
        l_i += tl.sum(tl.exp2((scores - m_new[:, None]) * LOG2E), 1)
        m_i = m_new
    offs_m = tl.program_id(0) * M + tl.arange(0, M)
    at = (part * tl.num_programs(1) + row).to(tl.int64) * queries + offs_m
    tl.store(m_ptr + at, m_i, mask=offs_m < queries)
    tl.store(l_ptr + at, l_i, mask=offs_m < queries)


@triton.jit(do_not_specialize=["heads", "group", "queries", "blocks", "most", "size", "tiles"])
def _part_mass(
    q_ptr, code_ptr, scale_ptr, weight_ptr, m_ptr, l_ptr, out_ptr, q_b, q_h, q_s, most,
    heads, group, queries, blocks, size, tiles, factor,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Masses of one part of the blocks, for a program's tiles."""
    row, part = tl.program_id(1), tl.program_id(2)
    q, q_scale = _quantised(q_ptr, q_b, q_h, q_s, heads, queries, factor, D, M)
    head = (row // heads * (heads // group) + row % heads // group).to(tl.int64)
    code_ptr += head * most * D
    scale_ptr += head * most
    weight_ptr += head * most
    offs_m = tl.program_id(0) * M + tl.arange(0, M)
    mask_m = offs_m < queries
    m_i = tl.full([M], LOWEST, tl.float32)
    l_i = tl.zeros([M], tl.float32)
    for other in tl.static_range(PARTS):
        at = (other * tl.num_programs(1) + row).to(tl.int64) * queries + offs_m
        m = tl.load(m_ptr + at, mask=mask_m, other=LOWEST)
        m_new = tl.maximum(m_i, m)
        l_i = l_i * tl.exp2((m_i - m_new) * LOG2E)
        l_i += tl.load(l_ptr + at, mask=mask_m, other=0.0) * tl.exp2((m - m_new) * LOG2E)
        m_i = m_new
    m_i = tl.where(mask_m, m_i, -LOWEST)  # no mass of queries that are not
    inverse = 1 / tl.maximum(l_i, 1e-30)
    offs_t = tl.program_id(0) * (M // TILE) + tl.arange(0, M // TILE)
    out_ptr += (row.to(tl.int64) * tiles + offs_t)[:, None] * blocks
    for start in tl.range(part * size, tl.minimum(blocks, (part + 1) * size), N):
        scores = _score(q, q_scale, code_ptr, scale_ptr, weight_ptr, start, blocks, N, D)
        p = tl.exp2((scores - m_i[:, None]) * LOG2E) * inverse[:, None]
        mass = tl.sum(tl.reshape(p, [M // TILE, TILE, N]), 1)
        offs_n = start + tl.arange(0, N)
        weight = tl.load(weight_ptr + offs_n, mask=offs_n < blocks, other=0.0)
        mass = tl.where((weight <= LOWEST)[None, :], -1.0, mass)
        inside = (offs_t < tiles)[:, None] & (offs_n < blocks)[None, :]
        tl.store(out_ptr + offs_n[None, :], mass, mask=inside)


@triton.jit
def _score(
    q, q_scale, code_ptr, scale_ptr, weight_ptr, start, blocks, N: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Scores [M, N] of blocks from `start` on; minus infinity behind the last."""
    offs_n = start + tl.arange(0, N)
    inside = offs_n < blocks
    k = tl.load(
        code_ptr + offs_n[:, None] * D + tl.arange(0, D)[None, :], mask=inside[:, None], other=0
    )
    k_scale = tl.load(scale_ptr + offs_n, mask=inside, other=0.0)
    bias = tl.load(weight_ptr + offs_n, mask=inside, other=float("-inf"))
    dots = tl.dot(q, k.T).to(tl.float32)
    return dots * q_scale[:, None] * k_scale[None, :] + bias[None, :]
