"""Attention with log-weights on a GPU: over all entries, or over listed blocks of them (Triton)."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tachyscope.kernels.block_table import BlockTable
from tachyscope.kernels.device import has_large_smem, multiprocessors

LOG2E = tl.constexpr(math.log2(math.e))
# a running maximum's start: finite, so that the difference to minus infinity is no NaN
LOWEST = tl.constexpr(-1e30)


class Setting(NamedTuple):
    """How the kernel is built and launched; results differ by rounding alone."""

    queries: int  # of a program's tile
    keys: int  # entries met at once
    warps: int
    stages: int  # of the pipeline that loads them
    described: bool = True  # loaded by the copy engine (TMA), else by pointers
    parts: int | None = None  # programs that share a tile's entries; None: as fills the device


# what one multiprocessor of an H200 computes, and all of them write, in a second
FLOPS, BYTES = 4e12, 3e12


def setting_of(device: torch.device, tile: int = 128, block: int = 128) -> Setting:
    """How tiles of queries meet blocks of entries there: as many at once as stand together."""
    queries = min(tile, 128)
    if has_large_smem(device):
        return Setting(queries, block, queries // 16, 3 if block == 128 else 4)
    return Setting(queries, min(block, 64), queries // 16, 3, described=False)


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, log_count: Tensor | None = None, setting: Setting | None = None
) -> Tensor:
    """softmax(q·k / √D + log_count) v, as `attention` defines it; zero if all slots are empty."""
    return flash(q, k, v, log_count, None, setting or setting_of(q.device))


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_count: Tensor | None,
    past: BlockTable | None,
    setting: Setting,
) -> Tensor:
    rows, heads, queries, width = q.shape
    out = torch.empty_like(q)
    tiles = triton.cdiv(queries, setting.queries)
    read = 0 if past is None else past.ids.shape[3] * past.block
    parts = setting.parts or _parts(
        tiles * rows * heads, k.shape[2] + read, width, setting, multiprocessors(q.device)
    )
    answers, sums = out, out
    if parts > 1:
        answers = torch.empty(parts, *q.shape, dtype=torch.float32, device=q.device)
        sums = torch.empty(parts, *q.shape[:3], dtype=torch.float32, device=q.device)
    if q.is_meta:
        return out
    assert past is None or (setting.queries <= past.tile and setting.keys <= past.block)
    n, weighted, listed = k.shape[2], log_count is not None, past is not None
    # where none is read, any tensor stands in
    w = k if log_count is None else aligned(log_count)
    there = BlockTable(k, v, w, w, w, setting.queries, setting.keys)
    if past is not None:
        there = past._replace(log_count=aligned(past.log_count))
    _flash[tiles, rows * heads, parts](
        q, _given(k, setting), _given(v, setting), _given(w, setting, weighted),
        _given(there.k, setting, listed), _given(there.v, setting, listed),
        _given(there.log_count, setting, listed), there.ids, there.counts, answers, sums,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], w.stride(0),
        w.stride(1) if w.shape[1] > 1 else 0, *answers.stride()[-4:-1],
        *there.k.stride()[:3], *there.v.stride()[:3], *there.log_count.stride()[:2],
        there.ids.stride(2), there.ids.shape[2], there.k.shape[2],
        heads, heads // k.shape[1], queries, n, 1 / math.sqrt(width),
        WEIGHTED=weighted, LISTED=listed, TILE=there.tile, BLOCK=there.block, PARTS=parts,
        D=width, M=setting.queries, N=setting.keys, DESCRIBED=setting.described,
        num_warps=setting.warps, num_stages=setting.stages,
    )  # fmt: skip
    if parts > 1:
        _join[triton.cdiv(queries, 16), rows * heads](
            answers, sums, out, *out.stride()[:3], heads, queries,
            PARTS=parts, D=width, M=16, num_warps=4,
        )  # fmt: skip
    return out


@functools.cache
def _parts(programs: int, entries: int, width: int, setting: Setting, count: int) -> int:
    """Into how many parts to cut the entries, so that no multiprocessor waits for the last ones."""

    def seconds(parts: int) -> float:
        pairs = setting.queries * entries / parts
        passes = triton.cdiv(programs * parts, count)
        joining = 0 if parts == 1 else parts * programs * setting.queries * width * 8 / BYTES
        return passes * pairs * 4 * width / FLOPS + joining

    return min(range(1, 1 + min(4, triton.cdiv(entries, 8 * setting.keys))), key=seconds)


def _given(x: Tensor, setting: Setting, read: bool = True) -> Any:
    """Entries [B, Hkv, n, D], or weights [B, Hkv or 1, n] in one row, as the kernel takes them."""
    if not (setting.described and read):
        return x
    if x.dim() == 4:
        box = [1, 1, setting.keys, x.shape[3]]
        return TensorDescriptor(x, list(x.shape), list(x.stride()), box)
    row = one_row(x)
    return TensorDescriptor(row, list(row.shape), [1], [setting.keys])


def one_row(x: Tensor) -> Tensor:
    """Weights [B, G, n], and what may lie between, as one row."""
    span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((span,), (1,))


def aligned(x: Tensor) -> Tensor:
    """x [B, G, n], copied where a row does not start at a multiple of 16 bytes."""
    steps = [step for n, step in zip(x.shape[:2], x.stride(), strict=False) if n > 1]
    if x.stride(2) == 1 and not any(step % 4 for step in (x.storage_offset(), *steps)):
        return x
    return F.pad(x, (0, -x.shape[2] % 4)).contiguous()[:, :, : x.shape[2]]


@triton.jit(
    do_not_specialize=[
        "w_b", "w_h", "pw_b", "pw_h", "most", "tiles", "slots", "heads", "group", "queries",
        "entries",
    ]
)  # fmt: skip
def _flash(
    q, k, v, log_count, past_k, past_v, past_logw, ids, counts, out, sums,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, w_b, w_h, o_b, o_h, o_s,
    pk_b, pk_h, pk_s, pv_b, pv_h, pv_s, pw_b, pw_h,
    most, tiles, slots, heads, group, queries, entries, scale,
    WEIGHTED: tl.constexpr, LISTED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    DESCRIBED: tl.constexpr,
):  # fmt: skip
    """A tile of one head's queries meets its listed blocks of the past, then entries in a row."""
    tile, row, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = row // heads, row % heads
    kv = h // group
    rows = tile * M + tl.arange(0, M)
    mine, at_d = (rows < queries)[:, None], tl.arange(0, D)[None, :]
    q += b.to(tl.int64) * q_b + h.to(tl.int64) * q_h
    asked = tl.load(q + rows.to(tl.int64)[:, None] * q_s + at_d, mask=mine, other=0.0)
    best = tl.full([M], LOWEST, tl.float32)
    total = tl.zeros([M], tl.float32)
    answer = tl.zeros([M, D], tl.float32)
    if not DESCRIBED:
        k += b.to(tl.int64) * k_b + kv.to(tl.int64) * k_h
        v += b.to(tl.int64) * v_b + kv.to(tl.int64) * v_h
        past_k += b.to(tl.int64) * pk_b + kv.to(tl.int64) * pk_h
        past_v += b.to(tl.int64) * pv_b + kv.to(tl.int64) * pv_h
    if LISTED:
        per: tl.constexpr = BLOCK // N
        listed = (row * tiles + tile * M // TILE).to(tl.int64)
        ids += listed * most
        steps = tl.load(counts + listed) * per
        first, last = steps * part // PARTS, steps * (part + 1) // PARTS
        # a block's number is fetched one step ahead, so that its keys need not wait for it
        block = tl.load(ids + first // per, mask=first < last, other=0)
        for step in tl.range(first, last):
            at = block * BLOCK + step % per * N
            block = tl.load(ids + (step + 1) // per, mask=step + 1 < last, other=0)
            keys = _load(past_k, b, kv, at, pk_s, slots, N, D, DESCRIBED, True)
            place = b * pw_b + kv * pw_h + at
            weights = _load_weights(past_logw, place, 0, N, DESCRIBED, False)
            scores = tl.dot(asked, keys.T) * scale + weights[None, :]
            share, best, total, answer = _weigh(scores, 1.0, best, total, answer)
            values = _load(past_v, b, kv, at, pv_s, slots, N, D, DESCRIBED, True)
            answer = tl.dot(share.to(values.dtype), values, answer)
    whole = entries // N
    for step in tl.range(whole * part // PARTS, whole * (part + 1) // PARTS):
        at = step * N
        keys = _load(k, b, kv, at, k_s, 0, N, D, DESCRIBED, False)
        scores = tl.dot(asked, keys.T)
        if WEIGHTED:
            weights = _load_weights(log_count, b * w_b + kv * w_h + at, 0, N, DESCRIBED, False)
            scores = scores * scale + weights[None, :]
            share, best, total, answer = _weigh(scores, 1.0, best, total, answer)
        else:
            share, best, total, answer = _weigh(scores, scale, best, total, answer)
        values = _load(v, b, kv, at, v_s, 0, N, D, DESCRIBED, False)
        answer = tl.dot(share.to(values.dtype), values, answer)
    at = whole * N
    if (part == PARTS - 1) & (at < entries):
        keys = _load(k, b, kv, at, k_s, entries, N, D, DESCRIBED, True)
        scores = tl.dot(asked, keys.T) * scale
        there = at + tl.arange(0, N) < entries
        if WEIGHTED:
            place = b * w_b + kv * w_h + at
            weights = _load_weights(log_count, place, entries - at, N, DESCRIBED, True)
            scores += tl.where(there, weights, float("-inf"))[None, :]
        else:
            scores += tl.where(there, 0.0, float("-inf"))[None, :]
        share, best, total, answer = _weigh(scores, 1.0, best, total, answer)
        values = _load(v, b, kv, at, v_s, entries, N, D, DESCRIBED, True)
        answer = tl.dot(share.to(values.dtype), values, answer)
    total = tl.maximum(total, 1e-30)  # nothing but empty slots: zero, not NaN
    if PARTS > 1:
        out += part.to(tl.int64) * tl.num_programs(1) * queries * D
        sums += (part * tl.num_programs(1) + row).to(tl.int64) * queries
        tl.store(sums + rows, best * LOG2E + tl.log2(total), mask=rows < queries)
    out += b.to(tl.int64) * o_b + h.to(tl.int64) * o_h
    answer = (answer / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + rows.to(tl.int64)[:, None] * o_s + at_d, answer, mask=mine)


@triton.jit
def _load(
    x, b, head, at, stride, end,
    N: tl.constexpr, D: tl.constexpr, DESCRIBED: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Entries from `at` on, [N, D]; the last ones may be fewer, and zeros follow them."""
    if DESCRIBED:
        return x.load([b, head, at, 0]).reshape(N, D)
    else:
        rows = (at + tl.arange(0, N))[:, None]
        x += rows.to(tl.int64) * stride + tl.arange(0, D)[None, :]
        if LAST:
            return tl.load(x, mask=rows < end, other=0.0)
        else:
            return tl.load(x)


@triton.jit
def _load_weights(x, at, end, N: tl.constexpr, DESCRIBED: tl.constexpr, LAST: tl.constexpr):
    """Weights from `at` on, [N]; what follows the last ones is anything."""
    if DESCRIBED:
        return x.load([at])
    elif LAST:
        return tl.load(x + at + tl.arange(0, N), mask=tl.arange(0, N) < end, other=0.0)
    else:
        return tl.load(x + at + tl.arange(0, N))


@triton.jit
def _weigh(scores, scale, best, total, answer):
    """Shares of scores · scale in a running softmax, and what it then stands at."""
    higher = tl.maximum(best, tl.max(scores, 1) * scale)
    share = tl.exp2(scores * (scale * LOG2E) - (higher * LOG2E)[:, None])
    shrink = tl.exp2((best - higher) * LOG2E)
    return share, higher, total * shrink + tl.sum(share, 1), answer * shrink[:, None]


@triton.jit(do_not_specialize=["heads", "queries"])
def _join(
    answers, sums, out, o_b, o_h, o_s, heads, queries,
    PARTS: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """One answer from those over parts of the entries, by the logarithm of each part's sum."""
    row, every = tl.program_id(1), tl.num_programs(1).to(tl.int64) * queries
    rows, at_d = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, D)[None, :]
    mine = rows < queries
    at = row.to(tl.int64) * queries + rows
    best = tl.full([M], LOWEST * 2, tl.float32)
    for part in tl.static_range(PARTS):
        best = tl.maximum(best, tl.load(sums + part * every + at, mask=mine, other=0.0))
    total = tl.zeros([M], tl.float32)
    answer = tl.zeros([M, D], tl.float32)
    for part in tl.static_range(PARTS):
        share = tl.exp2(tl.load(sums + part * every + at, mask=mine, other=0.0) - best)
        found = answers + (part * every + at)[:, None] * D + at_d
        total += share
        answer += share[:, None] * tl.load(found, mask=mine[:, None], other=0.0)
    out += (row // heads).to(tl.int64) * o_b + (row % heads).to(tl.int64) * o_h
    answer = (answer / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + rows.to(tl.int64)[:, None] * o_s + at_d, answer, mask=mine[:, None])
