"""Attention with log-weights on a Hopper GPU (Gluon): a warp that loads, two groups that compute.

Each group of four warps owns half of a tile's queries. It sends for the next scores and for the
present answer at once, and weighs the scores while the answer is still being computed.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tachyscope.kernels.attention.triton import aligned, one_row
from tachyscope.kernels.block_table import BlockTable, Read, pairs_of
from tachyscope.kernels.device import multiprocessors
from tachyscope.kernels.launch import launch
from tachyscope.kernels.online_softmax import LOG2E, LOWEST, join_shares

if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
    raise ImportError(f"Triton 3.6 or later is needed, got {triton.__version__}")

# its name in Triton 3.6, and since
load_async = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

# queries of a group of warps, and of a program's tile
HALF, TILE = gl.constexpr(64), gl.constexpr(128)
# by the size of a block, how many blocks of keys and of values are loaded or under way
STAGES = {128: 2, 64: 4, 32: 4}


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, log_count: Tensor | None = None, causal: bool = False
) -> Tensor:
    """`attention` without a causal mask; zero if all slots are empty."""
    assert not causal
    return flash(q, k, v, log_count, None)


def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, past: BlockTable, kept: tuple[Tensor, ...] = ()
) -> Read:
    """`block_sparse_attention`; nothing is kept."""
    return Read(flash(q, k, v, None, past.decoded()), pairs_of(q, k, past))


class Shares(NamedTuple):
    """Which program computes what: first whole tiles, then equal shares of those that are left."""

    whole: int
    left: int
    programs: int  # that share the left ones
    units: int  # of a tile


def _shares(tiles: int, units: int, processors: int) -> Shares:
    """Tiles that fill no whole wave are cut, so that no multiprocessor waits for the last ones."""
    left = tiles % processors
    # a share under four steps is not worth its start, nor are over 16 shares worth their join
    programs = min(processors, left * min(max(units // 4, 1), 16))
    if programs <= left:
        return Shares(tiles, 0, 1, units)
    return Shares(tiles - left, left, programs, units)


def flash(
    q: Tensor, k: Tensor, v: Tensor, log_count: Tensor | None, past: BlockTable | None
) -> Tensor:
    rows, heads, queries, width = q.shape
    out = torch.empty_like(q)
    tile, n = TILE.value, 128 if past is None else past.block
    tiles = triton.cdiv(queries, tile)
    units = triton.cdiv(k.shape[2], n) + (0 if past is None else past.ids.shape[3])
    cut = _shares(tiles * rows * heads, units, multiprocessors(q.device))
    slots = cut.left + cut.programs if cut.left else 0
    parts, lse_parts = out, out
    if slots:
        parts = torch.empty(slots, tile, width, dtype=torch.float32, device=q.device)
        lse_parts = torch.empty(slots, tile, dtype=torch.float32, device=q.device)
    assert past is None or past.tile % tile == 0
    weighted, listed = log_count is not None, past is not None
    # where none is read, any tensor stands in
    w = k if log_count is None else aligned(log_count)
    table = BlockTable(k, v, w, w, w, tile, n)
    if past is not None:
        table = past._replace(log_count=aligned(past.log_count))
    _launch(
        cut.whole + (cut.programs if cut.left else 0),
        (table.ids, table.counts,
            out, parts, lse_parts, *(() if weighted else (w,))),
        (
            _entries(q, HALF.value), _entries(k, n), _entries(v, n),
            _weights(w, n) if weighted else w,
            _entries(table.k, n) if listed else k, _entries(table.v, n) if listed else v,
            _weights(table.log_count, n) if listed else w, table.ids, table.counts,
            out, parts, lse_parts, *out.stride()[:3], w.stride(0),
            w.stride(1) if w.shape[1] > 1 else 0,
            *table.log_count.stride()[:2], table.ids.stride(2), table.ids.shape[2],
            tiles, heads, heads // k.shape[1], queries, k.shape[2], *cut, 1 / math.sqrt(width),
        ),
        (weighted, listed, table.tile, width, n, STAGES[n]),
    )  # fmt: skip
    if cut.left:
        launch(
            join_shares, (cut.left, tile // 16),
            parts, lse_parts, out, *out.stride()[:3], tiles, heads, queries, *cut,
            D=width, T=tile, M=16, num_warps=4,
        )  # fmt: skip
    return out


# compiled kernels, by all that makes Triton compile another
_built: dict[tuple[object, ...], Any] = {}


def _launch(
    programs: int, pointers: Sequence[Tensor], given: tuple[Any, ...], fixed: tuple[Any, ...]
) -> None:
    """Launch `_flash`; Triton's own search for the compiled kernel takes longer than the launch."""
    out = pointers[2]
    if out.is_meta:  # as `launch`
        return
    like = tuple((x.dtype, x.data_ptr() % 16 == 0) for x in pointers)
    wide = tuple(x >= 2**31 for x in given if isinstance(x, int))
    key = (out.device, fixed, like, wide, tuple((n == 1, n % 16 == 0) for n in out.stride()[:3]))
    kernel = _built.get(key)
    if kernel is not None:
        kernel[programs, 1, 1](*given, *fixed)
        return
    # twelve warps in all: so two groups may have 240 registers a thread, and the third 24
    _built[key] = _flash[programs, 1, 1](*given, *fixed, num_warps=4, maxnreg=168)


def _entries(x: Tensor, n: int) -> Any:
    """Entries [B, H, n, D] as the copy engine takes them."""
    box = (1, 1, n, x.shape[3])
    layout = _layout(box, gl.bfloat16)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(box), layout)


def _weights(x: Tensor, n: int) -> Any:
    """Weights [B, H or 1, n], in one row."""
    row = one_row(x)
    return TensorDescriptor(row, list(row.shape), [1], [n], _layout((n,), gl.float32))


@functools.cache
def _layout(box: tuple[int, ...], dtype: Any) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(box), dtype)


@gluon.jit
def _work(whole, left, programs, units):
    """A program's work: from where to where in units of all tiles in a row."""
    program = gl.program_id(0)
    start, stop = program * units, (program + 1) * units
    if program >= whole:
        share = program - whole
        start = whole * units + share * (left * units) // programs
        stop = whole * units + (share + 1) * (left * units) // programs
    return start, stop


@gluon.jit
def _load_kv(
    k, v, log_count, b, head, at, place, step, rings, bars,
    WEIGHTED: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Send for the entries from `at` on, as soon as there is room."""
    k_smem, v_smem, bias_smem = rings
    k_ready, k_free, v_ready, v_free = bars
    slot, old = step % STAGES, (step // STAGES & 1) ^ 1
    ready = k_ready.index(slot)
    mbarrier.wait(k_free.index(slot), old)
    mbarrier.expect(ready, N * D * 2 + N * 4 * WEIGHTED)
    load_async(k, [b, head, at, 0], ready, k_smem.index(slot))
    if WEIGHTED:
        fence_async_shared()  # the groups read the last weights there themselves
        load_async(log_count, [place], ready, bias_smem.index(slot))
    ready = v_ready.index(slot)
    mbarrier.wait(v_free.index(slot), old)
    mbarrier.expect(ready, N * D * 2)
    load_async(v, [b, head, at, 0], ready, v_smem.index(slot))


@gluon.jit
def _producer(
    given, ids, counts, numbers, cut, q_smem, rings, bars, q_ready, q_free,
    WEIGHTED: gl.constexpr, SPARSE: gl.constexpr, SPAN: gl.constexpr,
    D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that loads: queries, then present entries from the last on, then listed ones."""
    q, k, v, log_count, past_k, past_v, past_log_count = given
    w_b, w_h, p_b, p_h, most, spans, tiles, heads, group, queries, entries = numbers
    whole, left, programs, units = cut
    start, stop = _work(whole, left, programs, units)
    blocks = (entries + N - 1) // N
    step = 0
    for each in range(start // units, (stop + units - 1) // units):
        lap = each - start // units
        row, tile = each // tiles, each % tiles
        b, h = row // heads, row % heads
        head = h // group
        first = gl.maximum(start - each * units, 0)
        last = gl.minimum(stop - each * units, units)
        mbarrier.wait(q_free, (lap & 1) ^ 1)
        mbarrier.expect(q_ready, TILE * D * 2)
        for half in gl.static_range(2):
            at = tile * TILE + half * HALF
            load_async(q, [b, h, at, 0], q_ready, q_smem.index(half))
        low, high = blocks * first // units, blocks * last // units
        for i in range(gl.maximum(high - low, 1)):
            at = gl.maximum(high - 1 - i, 0) * N
            place = b * w_b + head * w_h + at
            _load_kv(k, v, log_count, b, head, at, place, step, rings, bars, WEIGHTED, N, D, STAGES)
            step += 1
        if SPARSE:
            listed = row * spans + tile * TILE // SPAN
            steps = gl.load(counts + listed)
            mine = ids + listed.to(gl.int64) * most
            begin, end = steps * first // units, steps * last // units
            base = b * p_b + head * p_h
            # a block's number is fetched one step ahead, so that its keys need not wait for it
            block = gl.load(mine + begin, mask=begin < end, other=0)
            for i in range(begin, end):
                at = block * N
                block = gl.load(mine + i + 1, mask=i + 1 < end, other=0)
                _load_kv(
                    past_k, past_v, past_log_count, b, head, at, base + at, step, rings, bars,
                    True, N, D, STAGES,
                )  # fmt: skip
                step += 1


@gluon.jit
def _online_softmax(scores, scale, m_i, l_i):
    """As `kernels/online_softmax.py`, which Gluon cannot call; alpha is left to apply."""
    m_new = gl.maximum(m_i, gl.max(scores, 1) * scale)
    p = gl.exp2(scores * (scale * LOG2E) - (m_new * LOG2E)[:, None])
    alpha = gl.exp2((m_i - m_new) * LOG2E)
    return p, m_new, l_i * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _wait(ready, step, needed, STAGES: gl.constexpr):
    mbarrier.wait(ready.index(step % STAGES), step // STAGES & 1, pred=needed)


@gluon.jit
def _step(
    q_smem, rings, bars, step, more, scale, state,
    WEIGHTED: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Weigh the next scores while the last shares meet their values."""
    k_smem, v_smem, bias_smem = rings
    k_ready, k_free, v_ready, v_free = bars
    p, m_i, l_i, alpha, acc = state
    like: gl.constexpr = _mma(N)
    slot, before = step % STAGES, (step - 1) % STAGES
    zeros = gl.zeros([HALF, N], gl.float32, like)
    key = k_smem.index(slot).permute([1, 0])
    scores = warpgroup_mma(q_smem, key, zeros, use_acc=False, is_async=True)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, _mma(D)))[:, None]
    _wait(v_ready, step - 1, True, STAGES)
    acc = warpgroup_mma(p, v_smem.index(before), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    if WEIGHTED:
        bias = bias_smem.index(slot).load(gl.SliceLayout(0, like))
        mbarrier.arrive(k_free.index(slot), count=1)
        scores = scores * scale + bias[None, :]
        p_next, m_i, l_i, alpha = _online_softmax(scores, 1.0, m_i, l_i)
    else:
        mbarrier.arrive(k_free.index(slot), count=1)
        p_next, m_i, l_i, alpha = _online_softmax(scores, scale, m_i, l_i)
    # this wait branches, and over a branch the compiler moves the next wait not ahead of the shares
    _wait(k_ready, step + 1, more, STAGES)
    acc, p, p_next = warpgroup_mma_wait(0, deps=(acc, p, p_next))
    mbarrier.arrive(v_free.index(before), count=1)
    p_next = gl.convert_layout(p_next.to(gl.bfloat16), gl.DotOperandLayout(0, _mma(D), 2))
    return p_next, m_i, l_i, alpha, acc


@gluon.constexpr_function
def _mma(n):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 16])


@gluon.jit
def _store_out(out, strides, b, h, first, queries, acc):
    """Write the answers of the queries from the first on."""
    o_b, o_h, o_s = strides
    like: gl.constexpr = acc.type.layout
    offs_m = first + gl.arange(0, acc.shape[0], gl.SliceLayout(1, like))
    offs_d = gl.arange(0, acc.shape[1], gl.SliceLayout(0, like))[None, :]
    out += b.to(gl.int64) * o_b + h.to(gl.int64) * o_h
    at = offs_m.to(gl.int64)[:, None] * o_s + offs_d
    gl.store(out + at, acc.to(out.dtype.element_ty), mask=(offs_m < queries)[:, None])


@gluon.jit
def _store_part(parts, lse_parts, first, acc, lse):
    """Write a share's answers and the logarithms of their sums, to be joined."""
    like: gl.constexpr = acc.type.layout
    offs_m = first + gl.arange(0, acc.shape[0], gl.SliceLayout(1, like))
    offs_d = gl.arange(0, acc.shape[1], gl.SliceLayout(0, like))[None, :]
    at = offs_m[:, None] * acc.shape[1] + offs_d
    gl.store(parts + at, acc.to(parts.dtype.element_ty))
    offs_m = first + gl.arange(0, acc.shape[0], lse.type.layout)
    gl.store(lse_parts + offs_m, lse.to(lse_parts.dtype.element_ty))


@gluon.jit
def _consumer(
    half: gl.constexpr, counts, out, parts, lse_parts, strides, numbers, cut, scale,
    q_smem, rings, bars, q_ready, q_free,
    WEIGHTED: gl.constexpr, SPARSE: gl.constexpr, SPAN: gl.constexpr,
    D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A group that computes: half of a tile's queries meet all that is loaded."""
    k_smem, v_smem, bias_smem = rings
    k_ready, k_free, v_ready, v_free = bars
    w_b, w_h, p_b, p_h, most, spans, tiles, heads, group, queries, entries = numbers
    whole, left, programs, units = cut
    like: gl.constexpr = _mma(N)
    wide: gl.constexpr = _mma(D)
    start, stop = _work(whole, left, programs, units)
    blocks = (entries + N - 1) // N
    q_smem = q_smem.index(half)
    step = 0
    for each in range(start // units, (stop + units - 1) // units):
        lap = each - start // units
        row, tile = each // tiles, each % tiles
        first = gl.maximum(start - each * units, 0)
        last = gl.minimum(stop - each * units, units)
        low, high = blocks * first // units, blocks * last // units
        sparse_steps = 0
        if SPARSE:
            steps = gl.load(counts + row * spans + tile * TILE // SPAN)
            sparse_steps = steps * last // units - steps * first // units
        m_i = gl.full([HALF], LOWEST, gl.float32, gl.SliceLayout(1, like))
        l_i = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, like))
        acc = gl.zeros([HALF, D], gl.float32, wide)
        zeros = gl.zeros([HALF, N], gl.float32, like)
        mbarrier.wait(q_ready, lap & 1)
        # the first block may be a part, or none at all
        slot, phase = step % STAGES, step // STAGES & 1
        mbarrier.wait(k_ready.index(slot), phase)
        key = k_smem.index(slot).permute([1, 0])
        scores = warpgroup_mma(q_smem, key, zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        at = gl.maximum(high - 1, 0) * N + gl.arange(0, N, gl.SliceLayout(0, like))
        there = (at < entries) & (low < high)
        bias = gl.zeros([N], gl.float32, gl.SliceLayout(0, like))
        if WEIGHTED:
            bias = bias_smem.index(slot).load(gl.SliceLayout(0, like))
        mbarrier.arrive(k_free.index(slot), count=1)
        scores = scores * scale + gl.where(there, bias, float("-inf"))[None, :]
        p_next, m_i, l_i, alpha = _online_softmax(scores, 1.0, m_i, l_i)
        p = gl.convert_layout(p_next.to(gl.bfloat16), gl.DotOperandLayout(0, wide, 2))
        step += 1
        end = step + gl.maximum(high - low - 1, 0) + sparse_steps
        _wait(k_ready, step, step < end, STAGES)
        state = (p, m_i, l_i, alpha, acc)
        for _ in range(high - low - 1):
            state = _step(
                q_smem, rings, bars, step, step + 1 < end, scale, state, WEIGHTED, N, D, STAGES,
            )  # fmt: skip
            step += 1
        if SPARSE:
            for _ in range(sparse_steps):
                state = _step(
                    q_smem, rings, bars, step, step + 1 < end, scale, state, True, N, D, STAGES,
                )  # fmt: skip
                step += 1
        mbarrier.arrive(q_free, count=1)
        p, m_i, l_i, alpha, acc = state
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, wide))[:, None]
        slot = (step - 1) % STAGES
        _wait(v_ready, step - 1, True, STAGES)
        acc = warpgroup_mma(p, v_smem.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_free.index(slot), count=1)
        l_i = gl.maximum(l_i, 1e-30)  # nothing but empty slots: zero, not NaN
        acc = acc / gl.convert_layout(l_i, gl.SliceLayout(1, wide))[:, None]
        if each < whole:
            top = tile * TILE + half * HALF
            _store_out(out, strides, row // heads, row % heads, top, queries, acc)
        else:
            # shares and tiles both go on along the row of work, so that their sum is a share's own
            part = gl.program_id(0) - whole + each - whole
            lse = m_i * LOG2E + gl.log2(l_i)
            _store_part(parts, lse_parts, part * TILE + half * HALF, acc, lse)


@gluon.jit(
    do_not_specialize=[
        "w_b", "w_h", "p_b", "p_h", "most", "spans", "tiles", "heads", "group", "queries",
        "entries", "whole", "left", "programs", "units",
    ]
)  # fmt: skip
def _flash(
    q, k, v, log_count, past_k, past_v, past_log_count, ids, counts, out, parts, lse_parts,
    o_b, o_h, o_s, w_b, w_h, p_b, p_h, most, spans, tiles, heads, group, queries, entries,
    whole, left, programs, units, scale,
    WEIGHTED: gl.constexpr, SPARSE: gl.constexpr, SPAN: gl.constexpr,
    D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Tiles of queries, or shares of them, meet entries in a row and listed blocks of the past."""
    plane: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, D], q.dtype)
    line: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N], gl.float32)
    q_smem = gl.allocate_shared_memory(q.dtype, [2, HALF, D], plane)
    k_smem = gl.allocate_shared_memory(q.dtype, [STAGES, N, D], plane)
    v_smem = gl.allocate_shared_memory(q.dtype, [STAGES, N, D], plane)
    bias_smem = gl.allocate_shared_memory(gl.float32, [STAGES, N], line)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], bar)
    q_free = gl.allocate_shared_memory(gl.int64, [1], bar)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(v_free.index(i), count=2)
    mbarrier.init(q_ready, count=1)
    mbarrier.init(q_free, count=2)
    fence_async_shared()
    given = (q, k, v, log_count, past_k, past_v, past_log_count)
    numbers = (w_b, w_h, p_b, p_h, most, spans, tiles, heads, group, queries, entries)
    cut = (whole, left, programs, units)
    strides = (o_b, o_h, o_s)
    rings = (k_smem, v_smem, bias_smem)
    bars = (k_ready, k_free, v_ready, v_free)
    gl.warp_specialize(
        [
            (_consumer, (
                0, counts, out, parts, lse_parts, strides, numbers, cut, scale, q_smem, rings, bars,
                q_ready, q_free, WEIGHTED, SPARSE, SPAN, D, N, STAGES,
            )),
            (_consumer, (
                1, counts, out, parts, lse_parts, strides, numbers, cut, scale, q_smem, rings, bars,
                q_ready, q_free, WEIGHTED, SPARSE, SPAN, D, N, STAGES,
            )),
            (_producer, (
                given, ids, counts, numbers, cut, q_smem, rings, bars, q_ready, q_free,
                WEIGHTED, SPARSE, SPAN, D, N, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
