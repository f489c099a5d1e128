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

from tachyscope.kernels.block_table import BlockTable, Read, pairs_of
from tachyscope.kernels.device import has_large_smem, multiprocessors
from tachyscope.kernels.launch import launch
from tachyscope.kernels.online_softmax import LOG2E, LOWEST, join_parts, online_softmax


class Setting(NamedTuple):
    """How the kernel is built and launched; results differ by rounding alone."""

    queries: int  # of a program's tile
    keys: int  # entries met at once
    warps: int
    stages: int  # of the pipeline that loads them
    use_tma: bool = True  # loaded by the copy engine (TMA), else by pointers
    parts: int | None = None  # programs that share a tile's entries; None: as fills the device


# what one multiprocessor of an H200 computes, and all of them write, in a second
FLOPS, BYTES = 4e12, 3e12


def setting_of(device: torch.device, tile: int = 128, block: int = 128) -> Setting:
    """How tiles of queries meet blocks of entries there: as many at once as stand together."""
    queries = min(tile, 128)
    if has_large_smem(device):
        return Setting(queries, block, queries // 16, 3 if block == 128 else 4)
    return Setting(queries, min(block, 64), queries // 16, 3, use_tma=False)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_count: Tensor | None = None,
    causal: bool = False,
    setting: Setting | None = None,
) -> Tensor:
    """`attention` without a causal mask; zero if all slots are empty."""
    assert not causal
    return flash(q, k, v, log_count, None, setting or setting_of(q.device))


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: BlockTable,
    kept: tuple[Tensor, ...] = (),
    setting: Setting | None = None,
) -> Read:
    """`block_sparse_attention`; nothing is kept."""
    setting = setting or setting_of(q.device, past.tile, past.block)
    return Read(flash(q, k, v, None, past.decoded(), setting), pairs_of(q, k, past))


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
    out_parts, lse = out, out
    if parts > 1:
        out_parts = torch.empty(parts, *q.shape, dtype=torch.float32, device=q.device)
        lse = torch.empty(parts, *q.shape[:3], dtype=torch.float32, device=q.device)
    assert past is None or (setting.queries <= past.tile and setting.keys <= past.block)
    n, weighted, listed = k.shape[2], log_count is not None, past is not None
    # where none is read, any tensor stands in
    w = k if log_count is None else aligned(log_count)
    table = BlockTable(k, v, w, w, w, setting.queries, setting.keys)
    if past is not None:
        table = past._replace(log_count=aligned(past.log_count))
    launch(
        _flash, (tiles, rows * heads, parts),
        q, _operand(k, setting), _operand(v, setting), _operand(w, setting, weighted),
        _operand(table.k, setting, listed), _operand(table.v, setting, listed),
        _operand(table.log_count, setting, listed), table.ids, table.counts, out_parts, lse,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], w.stride(0),
        w.stride(1) if w.shape[1] > 1 else 0, *out_parts.stride()[-4:-1],
        *table.k.stride()[:3], *table.v.stride()[:3], *table.log_count.stride()[:2],
        table.ids.stride(2), table.ids.shape[2], table.k.shape[2],
        heads, heads // k.shape[1], queries, n, 1 / math.sqrt(width),
        WEIGHTED=weighted, SPARSE=listed, TILE=table.tile, BLOCK=table.block, PARTS=parts,
        D=width, M=setting.queries, N=setting.keys, USE_TMA=setting.use_tma,
        num_warps=setting.warps, num_stages=setting.stages,
    )  # fmt: skip
    if parts > 1:
        launch(
            join_parts, (triton.cdiv(queries, 16), rows * heads),
            out_parts, lse, out, *out.stride()[:3], heads, queries,
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


def _operand(x: Tensor, setting: Setting, read: bool = True) -> Any:
    """Entries [B, Hkv, n, D], or weights [B, Hkv or 1, n] in one row, as the kernel takes them."""
    if not (setting.use_tma and read):
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
    q_ptr, k_ptr, v_ptr, log_count_ptr, past_k_ptr, past_v_ptr, past_log_count_ptr,
    ids_ptr, counts_ptr, out_ptr, lse_ptr,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, w_b, w_h, o_b, o_h, o_s,
    pk_b, pk_h, pk_s, pv_b, pv_h, pv_s, pw_b, pw_h,
    most, tiles, slots, heads, group, queries, entries, scale,
    WEIGHTED: tl.constexpr, SPARSE: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    USE_TMA: tl.constexpr,
):  # fmt: skip
    """A tile of one head's queries meets its listed blocks of the past, then entries in a row."""
    tile, row, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = row // heads, row % heads
    kv = h // group
    offs_m = tile * M + tl.arange(0, M)
    mask_m, offs_d = (offs_m < queries)[:, None], tl.arange(0, D)[None, :]
    q_ptr += b.to(tl.int64) * q_b + h.to(tl.int64) * q_h
    q = tl.load(q_ptr + offs_m.to(tl.int64)[:, None] * q_s + offs_d, mask=mask_m, other=0.0)
    m_i = tl.full([M], LOWEST, tl.float32)
    l_i = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    if not USE_TMA:
        k_ptr += b.to(tl.int64) * k_b + kv.to(tl.int64) * k_h
        v_ptr += b.to(tl.int64) * v_b + kv.to(tl.int64) * v_h
        past_k_ptr += b.to(tl.int64) * pk_b + kv.to(tl.int64) * pk_h
        past_v_ptr += b.to(tl.int64) * pv_b + kv.to(tl.int64) * pv_h
    if SPARSE:
        per: tl.constexpr = BLOCK // N
        tile_row = (row * tiles + tile * M // TILE).to(tl.int64)
        ids_ptr += tile_row * most
        steps = tl.load(counts_ptr + tile_row) * per
        first, last = steps * part // PARTS, steps * (part + 1) // PARTS
        # a block's number is fetched one step ahead, so that its keys need not wait for it
        block = tl.load(ids_ptr + first // per, mask=first < last, other=0)
        for step in tl.range(first, last):
            start = block * BLOCK + step % per * N
            block = tl.load(ids_ptr + (step + 1) // per, mask=step + 1 < last, other=0)
            k = _load(past_k_ptr, b, kv, start, pk_s, slots, N, D, USE_TMA, True)
            bias_at = b * pw_b + kv * pw_h + start
            bias = _load_bias(past_log_count_ptr, bias_at, 0, N, USE_TMA, False)
            scores = tl.dot(q, k.T) * scale + bias[None, :]
            p, m_i, l_i, acc = online_softmax(scores, 1.0, m_i, l_i, acc)
            v = _load(past_v_ptr, b, kv, start, pv_s, slots, N, D, USE_TMA, True)
            acc = tl.dot(p.to(v.dtype), v, acc)
    whole = entries // N
    for step in tl.range(whole * part // PARTS, whole * (part + 1) // PARTS):
        start = step * N
        k = _load(k_ptr, b, kv, start, k_s, 0, N, D, USE_TMA, False)
        scores = tl.dot(q, k.T)
        if WEIGHTED:
            bias = _load_bias(log_count_ptr, b * w_b + kv * w_h + start, 0, N, USE_TMA, False)
            scores = scores * scale + bias[None, :]
            p, m_i, l_i, acc = online_softmax(scores, 1.0, m_i, l_i, acc)
        else:
            p, m_i, l_i, acc = online_softmax(scores, scale, m_i, l_i, acc)
        v = _load(v_ptr, b, kv, start, v_s, 0, N, D, USE_TMA, False)
        acc = tl.dot(p.to(v.dtype), v, acc)
    start = whole * N
    if (part == PARTS - 1) & (start < entries):
        k = _load(k_ptr, b, kv, start, k_s, entries, N, D, USE_TMA, True)
        scores = tl.dot(q, k.T) * scale
        inside = start + tl.arange(0, N) < entries
        if WEIGHTED:
            bias_at = b * w_b + kv * w_h + start
            bias = _load_bias(log_count_ptr, bias_at, entries - start, N, USE_TMA, True)
            scores += tl.where(inside, bias, float("-inf"))[None, :]
        else:
            scores += tl.where(inside, 0.0, float("-inf"))[None, :]
        p, m_i, l_i, acc = online_softmax(scores, 1.0, m_i, l_i, acc)
        v = _load(v_ptr, b, kv, start, v_s, entries, N, D, USE_TMA, True)
        acc = tl.dot(p.to(v.dtype), v, acc)
    l_i = tl.maximum(l_i, 1e-30)  # nothing but empty slots: zero, not NaN
    if PARTS > 1:
        out_ptr += part.to(tl.int64) * tl.num_programs(1) * queries * D
        lse_ptr += (part * tl.num_programs(1) + row).to(tl.int64) * queries
        tl.store(lse_ptr + offs_m, m_i * LOG2E + tl.log2(l_i), mask=offs_m < queries)
    out_ptr += b.to(tl.int64) * o_b + h.to(tl.int64) * o_h
    acc = (acc / l_i[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offs_m.to(tl.int64)[:, None] * o_s + offs_d, acc, mask=mask_m)


@triton.jit
def _load(
    x, b, head, start, stride, end,
    N: tl.constexpr, D: tl.constexpr, USE_TMA: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Entries from `at` on, [N, D]; the last ones may be fewer, and zeros follow them."""
    if USE_TMA:
        return x.load([b, head, start, 0]).reshape(N, D)
    else:
        rows = (start + tl.arange(0, N))[:, None]
        x += rows.to(tl.int64) * stride + tl.arange(0, D)[None, :]
        if LAST:
            return tl.load(x, mask=rows < end, other=0.0)
        else:
            return tl.load(x)


@triton.jit
def _load_bias(x, start, end, N: tl.constexpr, USE_TMA: tl.constexpr, LAST: tl.constexpr):
    """Weights from `at` on, [N]; what follows the last ones is anything."""
    if USE_TMA:
        return x.load([start])
    elif LAST:
        return tl.load(x + start + tl.arange(0, N), mask=tl.arange(0, N) < end, other=0.0)
    else:
        return tl.load(x + start + tl.arange(0, N))
