"""Attention of several tokens in a row, as a pass over drafts has them, in one launch (Triton).

A program reads a share of the entries for all tokens of one query head; the last of a head to end
joins the shares. The first also holds the tokens' own keys and values: it turns and writes them,
and lets each token see those before it. Where the tokens stand is a number on the device.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tachyscope.kernels.decode_attention.step import MAX_SEVERAL_SPLITS, Scratch, Step
from tachyscope.kernels.decode_attention.triton import rotated
from tachyscope.kernels.device import multiprocessors
from tachyscope.kernels.launch import launch
from tachyscope.kernels.online_softmax import LOWEST

BLOCK = 64  # entries of a step


def decode_attention(
    out: Tensor,
    qkv: Tensor,
    step: Step,
    scratch: Scratch,
    tokens: int = 1,
    splits: int | None = None,
) -> Tensor:
    """`decode_attention` of `tokens` tokens a row; qkv and out are contiguous."""
    assert step.gate is None
    held, (rows, hkv, slots, d) = step.entries, step.entries.k.shape
    reads = slots if step.window is None else step.window.sink + step.window.near
    block = min(BLOCK, max(16, triton.next_power_of_2(reads)))
    if splits is None:
        wanted = max(1, multiprocessors(qkv.device) // (rows * step.heads))
        splits = min(MAX_SEVERAL_SPLITS, *map(triton.next_power_of_2, (wanted, -(-reads // block))))
    rotation, window, log_count = step.rotation, step.window, held.log_count
    cos, sin = (qkv, qkv) if rotation is None else (rotation.cos, rotation.sin)
    by_row = 0 if rotation is None or cos.shape[0] == 1 else cos.stride(0)
    by_head = 0 if log_count is None or log_count.shape[1] == 1 else log_count.stride(1)
    many = max(16, triton.next_power_of_2(tokens))
    launch(
        _several_attention, (rows * step.heads, splits),
        out, qkv, held.k, held.v, held.slot, step.place, cos, sin,
        out if log_count is None else log_count, out if held.unrotated is None else held.unrotated,
        held.slot if window is None else window.padding, scratch.parts, scratch.done,
        held.k.stride(0), held.k.stride(1), by_row,
        0 if log_count is None else log_count.stride(0), by_head,
        *((0, 0) if window is None else (window.sink, window.near)),
        HEADS=step.heads, HKV=hkv, D=d, WIDE=max(16, triton.next_power_of_2(d)), TOKENS=tokens,
        M=many, SPLITS=splits, BLOCK=block,
        ROPE="" if rotation is None else "pairs" if rotation.interleaved else "halves",
        WEIGHTED=log_count is not None, WINDOW=window is not None,
        UNROTATED=held.unrotated is not None, num_warps=8, num_stages=2,
    )  # fmt: skip
    return out


# one program for all layers and places
@triton.jit(do_not_specialize=["sink", "near", "slot_ptr", "place_ptr"])
def _several_attention(
    out, qkv, k_ptr, v_ptr, slot_ptr, place_ptr, cos_ptr, sin_ptr, log_count, unrotated, padding,
    parts, done, k_b, k_h, angle_b, log_b, log_h, sink, near,
    HEADS: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    TOKENS: tl.constexpr, M: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    ROPE: tl.constexpr, WEIGHTED: tl.constexpr, WINDOW: tl.constexpr, UNROTATED: tl.constexpr,
):  # fmt: skip
    head, split = tl.program_id(0), tl.program_id(1)
    b, h = head // HEADS, head % HEADS
    hk = h // (HEADS // HKV)
    slot, place = tl.load(slot_ptr), tl.load(place_ptr)
    token, offs_d = tl.arange(0, M), tl.arange(0, WIDE)[None, :]
    mine = (token < TOKENS)[:, None] & (offs_d < D)
    row = (b * TOKENS + tl.minimum(token, TOKENS - 1))[:, None].to(tl.int64)
    qkv += row * (HEADS + 2 * HKV) * D
    angle = b.to(tl.int64) * angle_b + (place + tl.minimum(token, TOKENS - 1))[:, None] * D
    q = rotated(qkv + h * D, cos_ptr + angle, sin_ptr + angle, offs_d, mine, D, ROPE)
    q = q.to(k_ptr.dtype.element_ty)
    entry = b.to(tl.int64) * k_b + hk.to(tl.int64) * k_h
    scale = 1.0 / tl.sqrt(D * 1.0)
    # what is read is the first entries as far as `first` goes, then others further on
    first, low, high, total, pads = slot, 0, 0, slot, 0
    if WINDOW:
        pads = tl.load(padding + b)
        if slot + 1 > pads + sink + near:
            first, low, high = sink, pads, slot + 1 - near - sink
            total = sink + near - 1
    share = tl.cdiv(total, SPLITS)
    start, end = split * share, tl.minimum((split + 1) * share, total)
    log_count += b.to(tl.int64) * log_b + hk.to(tl.int64) * log_h
    m_i = tl.full([M], LOWEST, tl.float32)
    l_i = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, WIDE], tl.float32)
    for n in range(start, end, BLOCK):
        index = n + tl.arange(0, BLOCK)
        here = index < end
        index += tl.where(index < first, low, high)
        at = index.to(tl.int64)[:, None] * D + offs_d
        mask = here[:, None] & (offs_d < D)
        k = tl.load(k_ptr + entry + at, mask=mask, other=0.0)
        v = tl.load(v_ptr + entry + at, mask=mask, other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale
        if WEIGHTED:
            bias = tl.load(log_count + index, mask=here, other=0.0)
            s += tl.maximum(bias, LOWEST)[None, :]
        seen = here[None, :] & (token >= 0)[:, None]
        if WINDOW:
            seen = seen & _in_window(slot + token, index, sink, near, pads)
        m_i, l_i, acc = _meet(s, seen, v, m_i, l_i, acc)
    if split == 0:
        # the tokens' own entries
        k = rotated(
            qkv + (HEADS + hk) * D, cos_ptr + angle, sin_ptr + angle, offs_d, mine, D, ROPE
        ).to(k_ptr.dtype.element_ty)
        v = tl.load(qkv + (HEADS + HKV + hk) * D + offs_d, mask=mine, other=0.0)
        own = entry + (slot + token).to(tl.int64)[:, None] * D + offs_d
        once = mine & (token[:, None] * 0 + h % (HEADS // HKV) == 0)
        tl.store(k_ptr + own, k, mask=once)
        tl.store(v_ptr + own, v, mask=once)
        if UNROTATED:
            plain = tl.load(qkv + (HEADS + hk) * D + offs_d, mask=once, other=0.0)
            tl.store(unrotated + own, plain, mask=once)
        s = tl.dot(q, tl.trans(k)) * scale
        seen = (token[None, :] <= token[:, None]) & (token < TOKENS)[None, :]
        if WINDOW:
            seen = seen & _in_window(slot + token, slot + token, sink, near, pads)
        m_i, l_i, acc = _meet(s, seen, v, m_i, l_i, acc)
    out += row * HEADS * D + h * D + offs_d
    if SPLITS == 1:
        tl.store(out, (acc / l_i[:, None]).to(out.dtype.element_ty), mask=mine)
    else:
        # shares lie as [rows * heads, SPLITS, M, D], behind them their maxima and sums
        sums = parts + tl.num_programs(0) * SPLITS * M * WIDE
        at = (head * SPLITS + split) * M + token
        tl.store(parts + at[:, None] * WIDE + offs_d, acc)
        tl.store(sums + at * 2, m_i)
        tl.store(sums + at * 2 + 1, l_i)
        tl.debug_barrier()
        if tl.atomic_add(done + head, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(done + head, 0)
            m = tl.full([M], LOWEST, tl.float32)
            for i in range(SPLITS):
                at = (head * SPLITS + i) * M + token
                m = tl.maximum(m, tl.load(sums + at * 2, cache_modifier=".cg"))
            l_i = tl.zeros([M], tl.float32)
            acc = tl.zeros([M, WIDE], tl.float32)
            for i in range(SPLITS):
                at = (head * SPLITS + i) * M + token
                p = tl.exp(tl.load(sums + at * 2, cache_modifier=".cg") - m)
                l_i += p * tl.load(sums + at * 2 + 1, cache_modifier=".cg")
                part = tl.load(parts + at[:, None] * WIDE + offs_d, cache_modifier=".cg")
                acc += p[:, None] * part
            tl.store(out, (acc / l_i[:, None]).to(out.dtype.element_ty), mask=mine)


@triton.jit
def _meet(s, seen, v, m_i, l_i, acc):
    """One step over scores [M, n] and values [n, D]; what is not seen counts nothing."""
    s = tl.where(seen, s, 2 * LOWEST)
    m_new = tl.maximum(m_i, tl.max(s, 1))
    p, alpha = tl.exp(s - m_new[:, None]), tl.exp(m_i - m_new)
    acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v)
    return m_new, l_i * alpha + tl.sum(p, 1), acc


@triton.jit
def _in_window(slot, index, sink, near, pads):
    """Whether tokens at slots [M] read entries at [n]: see `Window`."""
    at, index = slot[:, None], index[None, :]
    first = (index >= pads) & (index < pads + sink)
    return first | (index > at - near) | (at + 1 <= pads + sink + near)
