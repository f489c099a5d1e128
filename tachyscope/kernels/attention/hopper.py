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
import triton.language as tl
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
from tachyscope.kernels.block_table import BlockTable
from tachyscope.kernels.device import multiprocessors

if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
    raise ImportError(f"Triton 3.6 or later is needed, got {triton.__version__}")

# its name in Triton 3.6, and since
load_async = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

LOG2E = gl.constexpr(math.log2(math.e))
# a running maximum's start: finite, so that the difference to minus infinity is no NaN
LOWEST = gl.constexpr(-1e30)
# queries of a group of warps, and of a program's tile
HALF, TILE = gl.constexpr(64), gl.constexpr(128)
# entries met at once, and how many times so many keys and values are held or under way
STAGES = {128: 2, 64: 4, 32: 4}


def flash_attention(q: Tensor, k: Tensor, v: Tensor, log_count: Tensor | None = None) -> Tensor:
    """softmax(q·k / √D + log_count) v, as `attention` defines it; zero if all slots are empty."""
    return flash(q, k, v, log_count, None)


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
    answers, sums = out, out
    if slots:
        answers = torch.empty(slots, tile, width, dtype=torch.float32, device=q.device)
        sums = torch.empty(slots, tile, dtype=torch.float32, device=q.device)
    if q.is_meta:
        return out
    assert past is None or past.tile % tile == 0
    weighted, listed = log_count is not None, past is not None
    # where none is read, any tensor stands in
    w = k if log_count is None else aligned(log_count)
    there = BlockTable(k, v, w, w, w, tile, n)
    if past is not None:
        there = past._replace(log_count=aligned(past.log_count))
    _launch(
        cut.whole + (cut.programs if cut.left else 0),
        (there.ids, there.counts,
            out, answers, sums, *(() if weighted else (w,))),
        (
            _entries(q, HALF.value), _entries(k, n), _entries(v, n),
            _weights(w, n) if weighted else w,
            _entries(there.k, n) if listed else k, _entries(there.v, n) if listed else v,
            _weights(there.log_count, n) if listed else w, there.ids, there.counts,
            out, answers, sums, *out.stride()[:3], w.stride(0),
            w.stride(1) if w.shape[1] > 1 else 0,
            *there.log_count.stride()[:2], there.ids.stride(2), there.ids.shape[2],
            tiles, heads, heads // k.shape[1], queries, k.shape[2], *cut, 1 / math.sqrt(width),
        ),
        (weighted, listed, there.tile, width, n, STAGES[n]),
    )  # fmt: skip
    if cut.left:
        _join[cut.left, tile // 16](
            answers, sums, out, *out.stride()[:3], tiles, heads, queries, *cut,
            D=width, T=tile, M=16, num_warps=4,
        )  # fmt: skip
    return out


# the kernel as it was built, by all that Triton builds it anew for
_built: dict[tuple[object, ...], Any] = {}


def _launch(
    programs: int, pointers: Sequence[Tensor], given: tuple[Any, ...], fixed: tuple[Any, ...]
) -> None:
    """Launch `_flash`. To find out that it is built Triton takes longer than the launch itself."""
    out = pointers[2]
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
def _fill(
    k, v, log_count, b, head, at, place, step, rings, bars,
    WEIGHTED: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Send for the entries from `at` on, as soon as there is room."""
    keys, values, weights = rings
    k_ready, k_free, v_ready, v_free = bars
    slot, old = step % STAGES, (step // STAGES & 1) ^ 1
    ready = k_ready.index(slot)
    mbarrier.wait(k_free.index(slot), old)
    mbarrier.expect(ready, N * D * 2 + N * 4 * WEIGHTED)
    load_async(k, [b, head, at, 0], ready, keys.index(slot))
    if WEIGHTED:
        fence_async_shared()  # the groups read the last weights there themselves
        load_async(log_count, [place], ready, weights.index(slot))
    ready = v_ready.index(slot)
    mbarrier.wait(v_free.index(slot), old)
    mbarrier.expect(ready, N * D * 2)
    load_async(v, [b, head, at, 0], ready, values.index(slot))


@gluon.jit
def _produce(
    given, ids, counts, numbers, cut, asked, rings, bars, q_ready, q_free,
    WEIGHTED: gl.constexpr, LISTED: gl.constexpr, SPAN: gl.constexpr,
    D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that loads: queries, then present entries from the last on, then listed ones."""
    q, k, v, log_count, past_k, past_v, past_logw = given
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
            load_async(q, [b, h, at, 0], q_ready, asked.index(half))
        low, high = blocks * first // units, blocks * last // units
        for i in range(gl.maximum(high - low, 1)):
            at = gl.maximum(high - 1 - i, 0) * N
            place = b * w_b + head * w_h + at
            _fill(k, v, log_count, b, head, at, place, step, rings, bars, WEIGHTED, N, D, STAGES)
            step += 1
        if LISTED:
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
                _fill(
                    past_k, past_v, past_logw, b, head, at, base + at, step, rings, bars,
                    True, N, D, STAGES,
                )  # fmt: skip
                step += 1


@gluon.jit
def _weigh(scores, scale, best, total):
    """Shares of scores · scale in a running softmax, and what it then stands at."""
    higher = gl.maximum(best, gl.max(scores, 1) * scale)
    share = gl.exp2(scores * (scale * LOG2E) - (higher * LOG2E)[:, None])
    shrink = gl.exp2((best - higher) * LOG2E)
    return share, higher, total * shrink + gl.sum(share, 1), shrink


@gluon.jit
def _await(ready, step, needed, STAGES: gl.constexpr):
    mbarrier.wait(ready.index(step % STAGES), step // STAGES & 1, pred=needed)


@gluon.jit
def _step(
    asked, rings, bars, step, more, scale, state,
    WEIGHTED: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Weigh the next scores while the last shares meet their values."""
    keys, values, weights = rings
    k_ready, k_free, v_ready, v_free = bars
    share, best, total, shrink, answer = state
    like: gl.constexpr = _mma(N)
    slot, before = step % STAGES, (step - 1) % STAGES
    nothing = gl.zeros([HALF, N], gl.float32, like)
    key = keys.index(slot).permute([1, 0])
    scores = warpgroup_mma(asked, key, nothing, use_acc=False, is_async=True)
    answer = answer * gl.convert_layout(shrink, gl.SliceLayout(1, _mma(D)))[:, None]
    _await(v_ready, step - 1, True, STAGES)
    answer = warpgroup_mma(share, values.index(before), answer, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    if WEIGHTED:
        weight = weights.index(slot).load(gl.SliceLayout(0, like))
        mbarrier.arrive(k_free.index(slot), count=1)
        scores = scores * scale + weight[None, :]
        fresh, best, total, shrink = _weigh(scores, 1.0, best, total)
    else:
        mbarrier.arrive(k_free.index(slot), count=1)
        fresh, best, total, shrink = _weigh(scores, scale, best, total)
    # this wait branches, and over a branch the compiler moves the next wait not ahead of the shares
    _await(k_ready, step + 1, more, STAGES)
    answer, share, fresh = warpgroup_mma_wait(0, deps=(answer, share, fresh))
    mbarrier.arrive(v_free.index(before), count=1)
    fresh = gl.convert_layout(fresh.to(gl.bfloat16), gl.DotOperandLayout(0, _mma(D), 2))
    return fresh, best, total, shrink, answer


@gluon.constexpr_function
def _mma(n):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 16])


@gluon.jit
def _give(out, strides, b, h, first, queries, answer):
    """Write the answers of the queries from the first on."""
    o_b, o_h, o_s = strides
    like: gl.constexpr = answer.type.layout
    rows = first + gl.arange(0, answer.shape[0], gl.SliceLayout(1, like))
    at_d = gl.arange(0, answer.shape[1], gl.SliceLayout(0, like))[None, :]
    out += b.to(gl.int64) * o_b + h.to(gl.int64) * o_h
    at = rows.to(gl.int64)[:, None] * o_s + at_d
    gl.store(out + at, answer.to(out.dtype.element_ty), mask=(rows < queries)[:, None])


@gluon.jit
def _set_aside(answers, sums, first, answer, summed):
    """Write a share's answers and the logarithms of their sums, to be joined."""
    like: gl.constexpr = answer.type.layout
    rows = first + gl.arange(0, answer.shape[0], gl.SliceLayout(1, like))
    at_d = gl.arange(0, answer.shape[1], gl.SliceLayout(0, like))[None, :]
    at = rows[:, None] * answer.shape[1] + at_d
    gl.store(answers + at, answer.to(answers.dtype.element_ty))
    rows = first + gl.arange(0, answer.shape[0], summed.type.layout)
    gl.store(sums + rows, summed.to(sums.dtype.element_ty))


@gluon.jit
def _consume(
    half: gl.constexpr, counts, out, answers, sums, strides, numbers, cut, scale,
    asked, rings, bars, q_ready, q_free,
    WEIGHTED: gl.constexpr, LISTED: gl.constexpr, SPAN: gl.constexpr,
    D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A group that computes: half of a tile's queries meet all that is loaded."""
    keys, values, weights = rings
    k_ready, k_free, v_ready, v_free = bars
    w_b, w_h, p_b, p_h, most, spans, tiles, heads, group, queries, entries = numbers
    whole, left, programs, units = cut
    like: gl.constexpr = _mma(N)
    wide: gl.constexpr = _mma(D)
    start, stop = _work(whole, left, programs, units)
    blocks = (entries + N - 1) // N
    asked = asked.index(half)
    step = 0
    for each in range(start // units, (stop + units - 1) // units):
        lap = each - start // units
        row, tile = each // tiles, each % tiles
        first = gl.maximum(start - each * units, 0)
        last = gl.minimum(stop - each * units, units)
        low, high = blocks * first // units, blocks * last // units
        listed = 0
        if LISTED:
            steps = gl.load(counts + row * spans + tile * TILE // SPAN)
            listed = steps * last // units - steps * first // units
        best = gl.full([HALF], LOWEST, gl.float32, gl.SliceLayout(1, like))
        total = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, like))
        answer = gl.zeros([HALF, D], gl.float32, wide)
        nothing = gl.zeros([HALF, N], gl.float32, like)
        mbarrier.wait(q_ready, lap & 1)
        # the first block may be a part, or none at all
        slot, phase = step % STAGES, step // STAGES & 1
        mbarrier.wait(k_ready.index(slot), phase)
        key = keys.index(slot).permute([1, 0])
        scores = warpgroup_mma(asked, key, nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        at = gl.maximum(high - 1, 0) * N + gl.arange(0, N, gl.SliceLayout(0, like))
        there = (at < entries) & (low < high)
        weight = gl.zeros([N], gl.float32, gl.SliceLayout(0, like))
        if WEIGHTED:
            weight = weights.index(slot).load(gl.SliceLayout(0, like))
        mbarrier.arrive(k_free.index(slot), count=1)
        scores = scores * scale + gl.where(there, weight, float("-inf"))[None, :]
        fresh, best, total, shrink = _weigh(scores, 1.0, best, total)
        share = gl.convert_layout(fresh.to(gl.bfloat16), gl.DotOperandLayout(0, wide, 2))
        step += 1
        end = step + gl.maximum(high - low - 1, 0) + listed
        _await(k_ready, step, step < end, STAGES)
        state = (share, best, total, shrink, answer)
        for _ in range(high - low - 1):
            state = _step(
                asked, rings, bars, step, step + 1 < end, scale, state, WEIGHTED, N, D, STAGES,
            )  # fmt: skip
            step += 1
        if LISTED:
            for _ in range(listed):
                state = _step(
                    asked, rings, bars, step, step + 1 < end, scale, state, True, N, D, STAGES,
                )  # fmt: skip
                step += 1
        mbarrier.arrive(q_free, count=1)
        share, best, total, shrink, answer = state
        answer = answer * gl.convert_layout(shrink, gl.SliceLayout(1, wide))[:, None]
        slot = (step - 1) % STAGES
        _await(v_ready, step - 1, True, STAGES)
        answer = warpgroup_mma(share, values.index(slot), answer, is_async=True)
        answer = warpgroup_mma_wait(0, deps=(answer,))
        mbarrier.arrive(v_free.index(slot), count=1)
        total = gl.maximum(total, 1e-30)  # nothing but empty slots: zero, not NaN
        answer = answer / gl.convert_layout(total, gl.SliceLayout(1, wide))[:, None]
        if each < whole:
            top = tile * TILE + half * HALF
            _give(out, strides, row // heads, row % heads, top, queries, answer)
        else:
            # shares and tiles both go on along the row of work, so that their sum is a share's own
            part = gl.program_id(0) - whole + each - whole
            summed = best * LOG2E + gl.log2(total)
            _set_aside(answers, sums, part * TILE + half * HALF, answer, summed)


@gluon.jit(
    do_not_specialize=[
        "w_b", "w_h", "p_b", "p_h", "most", "spans", "tiles", "heads", "group", "queries",
        "entries", "whole", "left", "programs", "units",
    ]
)  # fmt: skip
def _flash(
    q, k, v, log_count, past_k, past_v, past_logw, ids, counts, out, answers, sums,
    o_b, o_h, o_s, w_b, w_h, p_b, p_h, most, spans, tiles, heads, group, queries, entries,
    whole, left, programs, units, scale,
    WEIGHTED: gl.constexpr, LISTED: gl.constexpr, SPAN: gl.constexpr,
    D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Tiles of queries, or shares of them, meet entries in a row and listed blocks of the past."""
    plane: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, D], q.dtype)
    line: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N], gl.float32)
    asked = gl.allocate_shared_memory(q.dtype, [2, HALF, D], plane)
    keys = gl.allocate_shared_memory(q.dtype, [STAGES, N, D], plane)
    values = gl.allocate_shared_memory(q.dtype, [STAGES, N, D], plane)
    weights = gl.allocate_shared_memory(gl.float32, [STAGES, N], line)
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
    given = (q, k, v, log_count, past_k, past_v, past_logw)
    numbers = (w_b, w_h, p_b, p_h, most, spans, tiles, heads, group, queries, entries)
    cut = (whole, left, programs, units)
    strides = (o_b, o_h, o_s)
    rings = (keys, values, weights)
    bars = (k_ready, k_free, v_ready, v_free)
    gl.warp_specialize(
        [
            (_consume, (
                0, counts, out, answers, sums, strides, numbers, cut, scale, asked, rings, bars,
                q_ready, q_free, WEIGHTED, LISTED, SPAN, D, N, STAGES,
            )),
            (_consume, (
                1, counts, out, answers, sums, strides, numbers, cut, scale, asked, rings, bars,
                q_ready, q_free, WEIGHTED, LISTED, SPAN, D, N, STAGES,
            )),
            (_produce, (
                given, ids, counts, numbers, cut, asked, rings, bars, q_ready, q_free,
                WEIGHTED, LISTED, SPAN, D, N, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@triton.jit(do_not_specialize=["tiles", "heads", "queries", "whole", "left", "programs", "units"])
def _join(
    answers, sums, out, o_b, o_h, o_s, tiles, heads, queries, whole, left, programs, units,
    D: tl.constexpr, T: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """One answer from its shares, by the logarithm of each share's sum."""
    mine = tl.program_id(0)
    each = whole + mine
    row, tile = each // tiles, each % tiles
    at = tl.program_id(1) * M + tl.arange(0, M)
    rows, at_d = tile * T + at, tl.arange(0, D)[None, :]
    # the shares that hold the tile's first unit and its last
    low = ((mine * units + 1) * programs - 1) // (left * units)
    high = ((mine + 1) * units * programs - 1) // (left * units)
    best = tl.full([M], -2e30, tl.float32)
    total = tl.zeros([M], tl.float32)
    answer = tl.zeros([M, D], tl.float32)
    for share in range(low, high + 1):
        place = (share + mine) * T + at
        found = tl.load(sums + place)
        higher = tl.maximum(best, found)
        shrink, grown = tl.exp2(best - higher), tl.exp2(found - higher)
        total = total * shrink + grown
        answer *= shrink[:, None]
        answer += grown[:, None] * tl.load(answers + place[:, None] * D + at_d)
        best = higher
    b, h = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    place = b * o_b + h * o_h + rows.to(tl.int64)[:, None] * o_s + at_d
    answer = (answer / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + place, answer, mask=(rows < queries)[:, None])
