"""Attention of float8 operands on a Hopper GPU (Gluon), built as `attention/hopper.py` is.

The tensor cores add products of float8 to about 14 bits only, so each block's output is computed
by itself and added to the others in float32. A block's scales cost nothing: that of the keys is in
the exponent's factor, that of the values in the factor that rescales earlier output.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
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
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tachyscope.kernels.attention.hopper import (
    HALF,
    TILE,
    _shares,
    _store_out,
    _store_part,
    _wait,
    _work,
    load_async,
)
from tachyscope.kernels.attention.triton import aligned, one_row
from tachyscope.kernels.attention_fp8 import torch as stock
from tachyscope.kernels.attention_fp8.torch import Entries, Listed
from tachyscope.kernels.attention_fp8.triton import quantise_entries, quantise_queries
from tachyscope.kernels.block_table import BlockTable, Read, pairs_of
from tachyscope.kernels.device import multiprocessors
from tachyscope.kernels.launch import launch
from tachyscope.kernels.online_softmax import LOG2E, LOWEST, join_shares

OFFSET = gl.constexpr(stock.OFFSET)
# by the size of a block, how many blocks of keys and of values are loaded or under way
STAGES = {128: 4, 64: 6, 32: 6}


def attention_fp8(q: Tensor, k: Tensor, v: Tensor, log_count: Tensor | None = None) -> Tensor:
    """As in torch.py."""
    held = quantise_entries(k, v, stock.BLOCK, log_count, stock.centre_of(k, log_count))
    return flash(*quantise_queries(q), held, k.shape[2], log_count, None, q.dtype)


def block_sparse_attention_fp8(
    q: Tensor, k: Tensor, v: Tensor, past: BlockTable, kept: tuple[Tensor, ...] = ()
) -> Read:
    """As in torch.py; the past's codes are kept for the next call."""
    size = past.k.shape[2] + -past.k.shape[2] % past.block
    if not kept or kept[0].shape[2] != size or kept[0].dtype != stock.FP8:
        held, centre = stock.held_as_fp8(past, quantise_entries, k.dtype)
        kept = (*held[:3], centre)
    held = Entries(kept[0], kept[1], kept[2], past.block)
    listed = Listed(held, past.log_count, past.ids, past.counts, past.tile)
    return listed_attention_fp8(q, k, v, listed, kept[3])._replace(kept=kept)


def listed_attention_fp8(
    q: Tensor, k: Tensor, v: Tensor, past: Listed, centre: Tensor, kept: tuple[Tensor, ...] = ()
) -> Read:
    """As in torch.py; nothing is kept."""
    present = quantise_entries(k, v, past.entries.block, None, centre)
    out = flash(*quantise_queries(q), present, k.shape[2], None, past, q.dtype)
    return Read(out, pairs_of(q, k, past.table(past.entries.k, past.entries.k)))


class Variant(NamedTuple):
    """How the kernel is compiled; results differ by rounding alone."""

    fresh: bool = True  # add a block's output in float32, not in the tensor cores
    turns: bool = False  # one warp group computes its softmax while the other multiplies
    stages: int = 0  # blocks of keys and of values in shared memory; 0: as in STAGES


def flash(
    q: Tensor,
    q_scale: Tensor,
    present: Entries,
    n: int,
    log_count: Tensor | None,
    past: Listed | None,
    dtype: torch.dtype = torch.bfloat16,
    variant: Variant | None = None,
) -> Tensor:
    """Attention of codes q [B, H, S, D] over the first n present entries, and listed blocks."""
    variant = variant or Variant()
    rows, heads, queries, width = q.shape
    # as a session's own: heads beside each other
    out = torch.empty(rows, queries, heads, width, dtype=dtype, device=q.device).transpose(1, 2)
    tile, block = TILE.value, present.block
    tiles = triton.cdiv(queries, tile)
    blocks = triton.cdiv(n, block)
    units = blocks + (0 if past is None else past.ids.shape[3])
    cut = _shares(tiles * rows * heads, units, multiprocessors(q.device))
    slots = cut.left + cut.programs if cut.left else 0
    parts, lse_parts = out, out
    if slots:
        parts = torch.empty(slots, tile, width, dtype=torch.float32, device=q.device)
        lse_parts = torch.empty(slots, tile, dtype=torch.float32, device=q.device)
    weighted, listed = log_count is not None, past is not None
    w = present.scale if log_count is None else aligned(log_count)
    old = present if past is None else past.entries
    assert old.block == block and (past is None or past.tile % tile == 0)
    old_w = w if past is None else aligned(past.log_count)
    ids, counts = (w, w) if past is None else (past.ids, past.counts)
    kv_heads = present.k.shape[1]
    args = (
        _tiles(q, HALF.value, width), _tiles(present.k, block, width),
        _tiles(present.v.flatten(2, 3), width, block), _row(w, block) if weighted else w,
        _tiles(old.k, block, width) if listed else q,
        _tiles(old.v.flatten(2, 3), width, block) if listed else q,
        _row(old_w, block) if listed else w, q_scale, present.scale, old.scale, ids, counts,
        out, parts, lse_parts, *out.stride()[:3], w.stride(0) if weighted else 0,
        w.stride(1) if weighted and w.shape[1] > 1 else 0, *old_w.stride()[:2],
        ids.stride(2), ids.shape[2], present.scale.shape[2], old.scale.shape[2],
        tiles, heads, heads // kv_heads, queries, n, *cut,
    )  # fmt: skip
    _launch(
        cut.whole + (cut.programs if cut.left else 0),
        (ids, counts, out, parts, lse_parts, w, q_scale, present.scale, old.scale), args,
        (weighted, listed, tile if past is None else past.tile, width, block,
            variant.stages or STAGES[block], variant.fresh, variant.turns),
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


def _tiles(x: Tensor, rows: int, columns: int) -> Any:
    """A TMA descriptor of codes [B, H, …], for tiles of rows x columns."""
    box = (1, 1, rows, columns)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(box), _layout(box, x.dtype))


def _row(x: Tensor, n: int) -> Any:
    row = one_row(x)
    return TensorDescriptor(row, list(row.shape), [1], [n], _layout((n,), x.dtype))


@functools.cache
def _layout(box: tuple[int, ...], dtype: torch.dtype) -> Any:
    kind = gl.float8e4nv if dtype == torch.float8_e4m3fn else gl.float32
    return gl.NVMMASharedLayout.get_default_for(list(box), kind)


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
    mbarrier.expect(ready, N * D + N * 4 * WEIGHTED)
    load_async(k, [b, head, at, 0], ready, k_smem.index(slot))
    if WEIGHTED:
        fence_async_shared()  # the groups read the last weights there themselves
        load_async(log_count, [place], ready, bias_smem.index(slot))
    ready = v_ready.index(slot)
    mbarrier.wait(v_free.index(slot), old)
    mbarrier.expect(ready, N * D)
    load_async(v, [b, head, at // N * D, 0], ready, v_smem.index(slot))


@gluon.jit
def _producer(
    given, ids, counts, numbers, cut, q_smem, rings, bars, q_ready, q_free,
    WEIGHTED: gl.constexpr, SPARSE: gl.constexpr, SPAN: gl.constexpr,
    D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that loads: queries, then present entries from the last on, then listed ones."""
    q, k, v, log_count, past_k, past_v, past_log_count = given
    w_b, w_h, p_b, p_h, most, spans, now, old, tiles, heads, group, queries, entries = numbers
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
        mbarrier.expect(q_ready, TILE * D)
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
def _softmax(scores, scale, m_i):
    """exp2(scores · scale - m_new + OFFSET), m_new, and what rescales earlier sums.

    The running maximum is rounded up to a whole number, so a later rise rescales by an exact power
    of two: the weights are rounded to float8 as if the last maximum had been known.
    """
    m_new = gl.maximum(m_i, gl.ceil(gl.max(scores, 1) * scale))
    p = gl.exp2(scores * scale[:, None] - (m_new - OFFSET)[:, None])
    return p, m_new, gl.exp2(m_i - m_new)


PACK = gl.constexpr(
    """
    {
    .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
    }
    """
)


@gluon.jit
def _pack(p, N: gl.constexpr):
    """Weights as float8, four to a 32-bit number: a thread holds all four, in the order of v."""
    p = p.reshape([HALF, N // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([HALF, N // 4, 2, 2])
    even, odd = p.split()
    a, c = even.split()
    b, d = odd.split()
    return gl.inline_asm_elementwise(PACK, "=r,r,r,r,r", [a, b, c, d], gl.int32, True, 1)


@gluon.jit
def _operand(p, N: gl.constexpr, D: gl.constexpr):
    """Packed weights as the first operand of wgmma; every thread holds its own already."""
    # each number four times, of which one is used: to unpack bytes would cost a third of a step
    two = gl.join(p, p)
    four = gl.join(two, two).reshape([HALF, N])
    four = gl.convert_layout(four, gl.DotOperandLayout(0, _mma8(D), 4))
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [four], gl.float8e4nv, True, 4
    )


@gluon.constexpr_function
def _mma8(n):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 32])


@gluon.jit
def _step(
    half: gl.constexpr, q_smem, q_scale, k_scale, shrink, turns, turn, rings, bars, step, more,
    state,
    WEIGHTED: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    FRESH: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Softmax of the next scores, while the last weights are multiplied by their values.

    shrink: the scale of the last block's values over that of the next.
    """
    k_smem, v_smem, bias_smem = rings
    k_ready, k_free, v_ready, v_free = bars
    p, m_i, l_i, less, acc = state
    like: gl.constexpr = _mma8(N)
    slot, before = step % STAGES, (step - 1) % STAGES
    key = k_smem.index(slot).permute([1, 0])
    code = _operand(p, N, D)
    if TURNS:
        mbarrier.wait(turns.index(half), (turn & 1) ^ (1 - half))
    scores = warpgroup_mma(
        q_smem, key, gl.zeros([HALF, N], gl.float32, like), use_acc=False, is_async=True
    )
    if not FRESH:
        acc = acc * gl.convert_layout(less, gl.SliceLayout(1, _mma8(D)))[:, None]
    _wait(v_ready, step - 1, True, STAGES)
    value = v_smem.index(before).permute([1, 0])
    if FRESH:
        more_acc = warpgroup_mma(
            code, value, gl.zeros([HALF, D], gl.float32, _mma8(D)), use_acc=False, is_async=True
        )
    else:
        more_acc = warpgroup_mma(code, value, acc, is_async=True)
    if TURNS:
        mbarrier.arrive(turns.index(1 - half), count=1)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    if WEIGHTED:
        bias = bias_smem.index(slot).load(gl.SliceLayout(0, like))
        mbarrier.arrive(k_free.index(slot), count=1)
        scores = scores * (q_scale * k_scale)[:, None] + bias[None, :]
        scale = gl.full([HALF], LOG2E, gl.float32, gl.SliceLayout(1, like))
        p_next, m_i, alpha = _softmax(scores, scale, m_i)
    else:
        mbarrier.arrive(k_free.index(slot), count=1)
        p_next, m_i, alpha = _softmax(scores, q_scale * (k_scale * LOG2E), m_i)
    l_i = l_i * alpha + gl.sum(p_next, 1)
    p_next = _pack(p_next, N)
    # this wait branches, and over a branch the compiler moves the next wait not ahead of the shares
    _wait(k_ready, step + 1, more, STAGES)
    more_acc, p, p_next = warpgroup_mma_wait(0, deps=(more_acc, p, p_next))
    mbarrier.arrive(v_free.index(before), count=1)
    if FRESH:
        acc = acc * gl.convert_layout(less, gl.SliceLayout(1, _mma8(D)))[:, None] + more_acc
    else:
        acc = more_acc
    return p_next, m_i, l_i, alpha * shrink, acc


@gluon.jit
def _scales(scales, at, needed):
    """The scales of a block's keys and of its values."""
    return (
        gl.load(scales + 2 * at, mask=needed, other=1.0),
        gl.load(scales + 2 * at + 1, mask=needed, other=1.0),
    )


@gluon.jit
def _consumer(
    half: gl.constexpr, ids, counts, scales, out, parts, lse_parts, strides, numbers, cut,
    q_smem, turns, rings, bars, q_ready, q_free,
    WEIGHTED: gl.constexpr, SPARSE: gl.constexpr, SPAN: gl.constexpr,
    D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
    FRESH: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """A group that computes: half of a tile's queries meet all that is loaded."""
    k_smem, v_smem, bias_smem = rings
    k_ready, k_free, v_ready, v_free = bars
    w_b, w_h, p_b, p_h, most, spans, now, old, tiles, heads, group, queries, entries = numbers
    whole, left, programs, units = cut
    q_scales, now_scales, old_scales = scales
    like: gl.constexpr = _mma8(N)
    wide: gl.constexpr = _mma8(D)
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
        kv_row = row // heads * (heads // group) + row % heads // group
        now_scale = now_scales + kv_row * now * 2
        old_scale = old_scales + kv_row * old * 2
        mine, begin, end = ids, 0, 0
        if SPARSE:
            listed = row * spans + tile * TILE // SPAN
            steps = gl.load(counts + listed)
            mine = ids + listed.to(gl.int64) * most
            begin, end = steps * first // units, steps * last // units
        rows = tile * TILE + half * HALF + gl.arange(0, HALF, gl.SliceLayout(1, like))
        q_scale = gl.load(
            q_scales + row.to(gl.int64) * queries + rows, mask=rows < queries, other=0.0
        )
        m_i = gl.full([HALF], LOWEST, gl.float32, gl.SliceLayout(1, like))
        l_i = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, like))
        acc = gl.zeros([HALF, D], gl.float32, wide)
        mbarrier.wait(q_ready, lap & 1)
        # the first block may be a part, or none at all
        slot, phase = step % STAGES, step // STAGES & 1
        k_scale, v_scale = _scales(now_scale, gl.maximum(high - 1, 0), True)
        mbarrier.wait(k_ready.index(slot), phase)
        key = k_smem.index(slot).permute([1, 0])
        scores = warpgroup_mma(
            q_smem, key, gl.zeros([HALF, N], gl.float32, like), use_acc=False, is_async=True
        )
        scores = warpgroup_mma_wait(0, deps=(scores,))
        at = gl.maximum(high - 1, 0) * N + gl.arange(0, N, gl.SliceLayout(0, like))
        there = (at < entries) & (low < high)
        bias = gl.zeros([N], gl.float32, gl.SliceLayout(0, like))
        if WEIGHTED:
            bias = bias_smem.index(slot).load(gl.SliceLayout(0, like))
        mbarrier.arrive(k_free.index(slot), count=1)
        scores = (
            scores * (q_scale * k_scale)[:, None] + gl.where(there, bias, float("-inf"))[None, :]
        )
        scale = gl.full([HALF], LOG2E, gl.float32, gl.SliceLayout(1, like))
        p_next, m_i, alpha = _softmax(scores, scale, m_i)
        l_i = l_i * alpha + gl.sum(p_next, 1)
        step += 1
        ahead = step + gl.maximum(high - low - 1, 0) + end - begin
        # of the next block; what follows it is fetched a step ahead
        k_next, v_next = _scales(now_scale, high - 2, high - low > 1)
        _wait(k_ready, step, step < ahead, STAGES)
        state = (_pack(p_next, N), m_i, l_i, alpha, acc)
        for i in range(high - low - 1):
            k_scale, shrink, v_scale = k_next, v_scale / v_next, v_next
            k_next, v_next = _scales(now_scale, high - 3 - i, i < high - low - 2)
            state = _step(
                half, q_smem, q_scale, k_scale, shrink, turns, step - 1 - lap, rings, bars, step,
                step + 1 < ahead, state,
                WEIGHTED, N, D, STAGES, FRESH, TURNS,
            )  # fmt: skip
            step += 1
        if SPARSE:
            block = gl.load(mine + begin, mask=begin < end, other=0)
            k_next, v_next = _scales(old_scale, block, begin < end)
            block = gl.load(mine + begin + 1, mask=begin + 1 < end, other=0)
            for i in range(begin, end):
                k_scale, shrink, v_scale = k_next, v_scale / v_next, v_next
                k_next, v_next = _scales(old_scale, block, i + 1 < end)
                block = gl.load(mine + i + 2, mask=i + 2 < end, other=0)
                state = _step(
                    half, q_smem, q_scale, k_scale, shrink, turns, step - 1 - lap, rings, bars,
                    step, step + 1 < ahead, state, True, N, D, STAGES, FRESH, TURNS,
                )  # fmt: skip
                step += 1
        mbarrier.arrive(q_free, count=1)
        p, m_i, l_i, less, acc = state
        slot = (step - 1) % STAGES
        _wait(v_ready, step - 1, True, STAGES)
        value = v_smem.index(slot).permute([1, 0])
        zeros = gl.zeros([HALF, D], gl.float32, wide)
        p = _operand(p, N, D)
        more_acc = warpgroup_mma(p, value, zeros, use_acc=False, is_async=True)
        more_acc = warpgroup_mma_wait(0, deps=(more_acc,))
        mbarrier.arrive(v_free.index(slot), count=1)
        acc = acc * gl.convert_layout(less, gl.SliceLayout(1, wide))[:, None] + more_acc
        l_i = gl.maximum(l_i, 1e-30)  # nothing but empty slots: zero, not NaN
        acc = acc * gl.convert_layout(v_scale / l_i, gl.SliceLayout(1, wide))[:, None]
        if each < whole:
            top = tile * TILE + half * HALF
            _store_out(out, strides, row // heads, row % heads, top, queries, acc)
        else:
            # shares and tiles both go on along the row of work, so that their sum is a share's own
            part = gl.program_id(0) - whole + each - whole
            _store_part(
                parts, lse_parts, part * TILE + half * HALF, acc, m_i - OFFSET + gl.log2(l_i)
            )


@gluon.jit(
    do_not_specialize=[
        "w_b", "w_h", "p_b", "p_h", "most", "spans", "now", "old", "tiles", "heads", "group",
        "queries", "entries", "whole", "left", "programs", "units",
    ]
)  # fmt: skip
def _flash(
    q, k, v, log_count, past_k, past_v, past_log_count, q_scale, now_scale, old_scale, ids, counts,
    out, parts, lse_parts, o_b, o_h, o_s, w_b, w_h, p_b, p_h, most, spans, now, old,
    tiles, heads, group, queries, entries, whole, left, programs, units,
    WEIGHTED: gl.constexpr, SPARSE: gl.constexpr, SPAN: gl.constexpr,
    D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
    FRESH: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Tiles of queries, or shares of them, meet entries in a row and listed blocks of the past."""
    plane: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, D], q.dtype)
    turned: gl.constexpr = gl.NVMMASharedLayout.get_default_for([D, N], q.dtype)
    line: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N], gl.float32)
    q_smem = gl.allocate_shared_memory(q.dtype, [2, HALF, D], plane)
    k_smem = gl.allocate_shared_memory(q.dtype, [STAGES, N, D], plane)
    v_smem = gl.allocate_shared_memory(q.dtype, [STAGES, D, N], turned)
    bias_smem = gl.allocate_shared_memory(gl.float32, [STAGES, N], line)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], bar)
    q_free = gl.allocate_shared_memory(gl.int64, [1], bar)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(v_free.index(i), count=2)
    mbarrier.init(q_ready, count=1)
    mbarrier.init(q_free, count=2)
    fence_async_shared()
    given = (q, k, v, log_count, past_k, past_v, past_log_count)
    numbers = (w_b, w_h, p_b, p_h, most, spans, now, old, tiles, heads, group, queries, entries)
    cut = (whole, left, programs, units)
    strides = (o_b, o_h, o_s)
    rings = (k_smem, v_smem, bias_smem)
    bars = (k_ready, k_free, v_ready, v_free)
    scales = (q_scale, now_scale, old_scale)
    gl.warp_specialize(
        [
            (_consumer, (
                0, ids, counts, scales, out, parts, lse_parts, strides, numbers, cut, q_smem, turns,
                rings, bars, q_ready, q_free, WEIGHTED, SPARSE, SPAN, D, N, STAGES, FRESH, TURNS,
            )),
            (_consumer, (
                1, ids, counts, scales, out, parts, lse_parts, strides, numbers, cut, q_smem, turns,
                rings, bars, q_ready, q_free, WEIGHTED, SPARSE, SPAN, D, N, STAGES, FRESH, TURNS,
            )),
            (_producer, (
                given, ids, counts, numbers, cut, q_smem, rings, bars, q_ready, q_free,
                WEIGHTED, SPARSE, SPAN, D, N, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
