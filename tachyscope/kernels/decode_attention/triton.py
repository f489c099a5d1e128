"""One token's attention, split over the entries, in one launch (Triton).

A program reads a share of one key head's entries; the last of a head to end joins the shares. How
many entries there are is a number on the device, so that one recorded launch serves every token.
Program 0 of a head also writes the token's key and value. Where the step has a gate, one more
program a head scores the query against the key kept of the last frame, and the last of these to
end decides.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tachyscope.kernels.decode_attention.step import MAX_SPLITS, Scratch, Step
from tachyscope.kernels.device import multiprocessors
from tachyscope.kernels.launch import Overlap, launch
from tachyscope.kernels.online_softmax import LOWEST
from tachyscope.kernels.pdl import wait_for_kernel_before
from tachyscope.kernels.token_gate.gate import GateState
from tachyscope.kernels.token_gate.triton import UNALIGNED, decide_rows, gate_args, gate_kinds

BLOCK = 32  # entries of a step


def decode_attention(
    out: Tensor,
    qkv: Tensor,
    step: Step,
    scratch: Scratch,
    tokens: int = 1,
    splits: int | None = None,
) -> Tensor:
    """`decode_attention` of one token a row; qkv and out are contiguous."""
    assert tokens == 1
    held, (rows, hkv, slots, d) = step.entries, step.entries.k.shape
    reads = slots if step.window is None else step.window.sink + step.window.near
    splits = splits or _splits(reads, rows * hkv, qkv.device)
    rotation, window, gate, log_count = step.rotation, step.window, step.gate, held.log_count
    cos, sin = (qkv, qkv) if rotation is None else (rotation.cos, rotation.sin)
    by_row = 0 if rotation is None or cos.shape[0] == 1 else cos.stride(0)
    by_head = 0 if log_count is None or log_count.shape[1] == 1 else log_count.stride(1)
    launch(
        _decode_attention, (rows * hkv, splits + (gate is not None)),
        out, qkv, held.k, held.v, held.slot, step.place, cos, sin,
        out if log_count is None else log_count, out if held.unrotated is None else held.unrotated,
        held.slot if window is None else window.padding, scratch.parts, scratch.scores,
        scratch.done, *_gate_args(gate, out, held.slot),
        held.k.stride(0), held.k.stride(1), by_row,
        0 if log_count is None else log_count.stride(0), by_head,
        0 if gate is None else gate.age.shape[1],
        *((0, 0) if window is None else (window.sink, window.near)), rows,
        HEADS=step.heads, HKV=hkv, D=d, WIDE=triton.next_power_of_2(d), GROUP=step.heads // hkv,
        G=triton.next_power_of_2(step.heads // hkv), PADDED=triton.next_power_of_2(hkv),
        SPLITS=splits, BLOCK=min(BLOCK, max(16, triton.next_power_of_2(reads))),
        ROPE="" if rotation is None else "pairs" if rotation.interleaved else "halves",
        WEIGHTED=log_count is not None, WINDOW=window is not None,
        UNROTATED=held.unrotated is not None, **_gate_kinds(gate),
        **Overlap.options(qkv), num_warps=4,
    )  # fmt: skip
    return out


def _splits(reads: int, heads: int, device: torch.device) -> int:
    """Enough programs for the GPU, of some steps each."""
    wanted = 2 * multiprocessors(device) // heads + 1
    useful = triton.cdiv(reads, BLOCK)
    return max(1, min(MAX_SPLITS, triton.next_power_of_2(wanted), triton.next_power_of_2(useful)))


def _gate_args(state: GateState | None, floats: Tensor, ints: Tensor) -> tuple[object, ...]:
    if state is None:
        own: tuple[object, ...] = (floats, 0.0, 0.0, *(ints,) * 4, *(floats,) * 3)
        return (*own, floats, floats)
    optional = (floats if x is None else x for x in (state.key, state.luck))
    return (*gate_args(state, floats), *optional)


def _gate_kinds(state: GateState | None) -> dict[str, object]:
    if state is None:
        nothing = {"RULE": "", "STRICT": False, "TIED": False, "AGE_LIMIT": 0, "PLACES": 1}
        return {"KEYED": False, "MIXED": False, **nothing}
    mixed = state.gate.score == "mixed"
    return {"KEYED": state.key is not None, "MIXED": mixed, **gate_kinds(state)}


# one program for all layers: flags and numbers lie side by side, few of them aligned
@triton.jit(
    do_not_specialize=[
        *UNALIGNED, "sink", "near", "slot_ptr",
    ]
)  # fmt: skip
def _decode_attention(
    out, qkv, k_ptr, v_ptr, slot_ptr, place_ptr, cos_ptr, sin_ptr, log_count, unrotated, padding,
    parts, scores_ptr, done, limit_ptr, computed, replayed, ready_ptr, skip, counts, age, recent,
    due, credit, key, luck,
    k_b, k_h, angle_b, log_b, log_h, places, sink, near, rows,
    HEADS: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    GROUP: tl.constexpr, G: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr, ROPE: tl.constexpr, WEIGHTED: tl.constexpr, WINDOW: tl.constexpr,
    UNROTATED: tl.constexpr, KEYED: tl.constexpr, MIXED: tl.constexpr, RULE: tl.constexpr,
    STRICT: tl.constexpr, TIED: tl.constexpr, AGE_LIMIT: tl.constexpr, PLACES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_kernel_before(PDL)
    head, split = tl.program_id(0), tl.program_id(1)
    b, hk = head // HKV, head % HKV
    slot, place = tl.load(slot_ptr), tl.load(place_ptr)
    g, offs_d = tl.arange(0, G)[:, None], tl.arange(0, WIDE)[None, :]
    mine = (g < GROUP) & (offs_d < D)
    qkv += b * (HEADS + 2 * HKV) * D
    angle = b.to(tl.int64) * angle_b + place * D
    q_at, k_at = (hk * GROUP + g) * D, (HEADS + hk + g * 0) * D
    q = rotated(qkv + q_at, cos_ptr + angle, sin_ptr + angle, offs_d, mine, D, ROPE)
    entry = b.to(tl.int64) * k_b + hk.to(tl.int64) * k_h
    scale = 1.0 / tl.sqrt(D * 1.0)
    once = mine & (g == 0)
    if (RULE != "") & (split == SPLITS):
        if KEYED:
            k = rotated(qkv + k_at, cos_ptr + angle, sin_ptr + angle, offs_d, mine, D, ROPE)
            if MIXED:
                q = tl.load(qkv + q_at + offs_d, mask=mine, other=0.0).to(tl.float32)
            held = key + (head.to(tl.int64) * places + place) * D + offs_d + g * 0
            old = tl.load(held, mask=mine, other=0.0).to(tl.float32)
            tl.store(scores_ptr + head, tl.sum(tl.where(mine, q * old, 0.0)) * scale / HEADS)
            tl.debug_barrier()
            tl.store(held, k.to(key.dtype.element_ty), mask=once)
        tl.debug_barrier()
        if tl.atomic_add(done + HKV * rows, 1, sem="acq_rel") == HKV * rows - 1:
            if KEYED:
                decide_rows(
                    scores_ptr, limit_ptr, computed, replayed, ready_ptr, skip, counts, age, recent,
                    due, credit, place, places, rows, HKV, PADDED, RULE, STRICT, TIED, AGE_LIMIT,
                    PLACES,
                )  # fmt: skip
            else:
                decide_rows(
                    luck + place * rows, limit_ptr, computed, replayed, ready_ptr, skip, counts,
                    age, recent, due, credit, place, places, rows, 1, 1, RULE, STRICT, TIED,
                    AGE_LIMIT, PLACES,
                )  # fmt: skip
            tl.store(done + HKV * rows, 0)
    else:
        # what is read is the first entries as far as `first` goes, then others further on
        first, low, high, total = slot, 0, 0, slot
        if WINDOW:
            pads = tl.load(padding + b)
            if slot + 1 > pads + sink + near:
                first, low, high = sink, pads, slot + 1 - near - sink
                total = sink + near - 1
        share = tl.cdiv(total, SPLITS)
        start, end = split * share, tl.minimum((split + 1) * share, total)
        log_count += b.to(tl.int64) * log_b + hk.to(tl.int64) * log_h
        if G == 1:
            m_i, l_i, acc = _read_rows(
                q, k_ptr + entry, v_ptr + entry, log_count, start, end, first, low, high, scale,
                D, WIDE, BLOCK, WEIGHTED,
            )  # fmt: skip
        else:
            m_i, l_i, acc = _read_groups(
                q, k_ptr + entry, v_ptr + entry, log_count, start, end, first, low, high, scale,
                G, D, WIDE, BLOCK, WEIGHTED,
            )  # fmt: skip
        if split == 0:
            # the token's own entry
            k = rotated(qkv + k_at, cos_ptr + angle, sin_ptr + angle, offs_d, mine, D, ROPE)
            v = tl.load(qkv + (HEADS + HKV + hk) * D + offs_d + g * 0, mask=mine, other=0.0)
            own = entry + slot.to(tl.int64) * D + offs_d + g * 0
            tl.store(k_ptr + own, k.to(k_ptr.dtype.element_ty), mask=once)
            tl.store(v_ptr + own, v, mask=once)
            if UNROTATED:
                tl.store(unrotated + own, tl.load(qkv + k_at + offs_d, mask=once), mask=once)
            s = tl.sum(q * k, 1) * scale
            m_new = tl.maximum(m_i, s)
            alpha, p = tl.exp(m_i - m_new), tl.exp(s - m_new)
            l_i = l_i * alpha + p
            acc = acc * alpha[:, None] + p[:, None] * v.to(tl.float32)
            m_i = m_new
        out += b * HEADS * D
        if SPLITS == 1:
            o = (acc / l_i[:, None]).to(out.dtype.element_ty)
            tl.store(out + q_at + offs_d, o, mask=mine)
        else:
            # shares lie as [rows * Hkv, G, SPLITS, D], behind them their maxima and sums
            sums = parts + tl.num_programs(0) * SPLITS * G * WIDE
            offs_g = tl.arange(0, G)
            row = (head * G + offs_g) * SPLITS + split
            tl.store(parts + row[:, None] * WIDE + offs_d, acc)
            tl.store(sums + row * 2, m_i)
            tl.store(sums + row * 2 + 1, l_i)
            tl.debug_barrier()
            if tl.atomic_add(done + head, 1, sem="acq_rel") == SPLITS - 1:
                tl.store(done + head, 0)
                for i in tl.static_range(GROUP):
                    rows_i = (head * G + i) * SPLITS + tl.arange(0, SPLITS)
                    m = tl.load(sums + rows_i * 2, cache_modifier=".cg")
                    l = tl.load(sums + rows_i * 2 + 1, cache_modifier=".cg")  # noqa: E741
                    part = tl.load(parts + rows_i[:, None] * WIDE + offs_d, cache_modifier=".cg")
                    p = tl.exp(m - tl.max(m, 0))
                    o = tl.sum(part * p[:, None], 0) / tl.sum(l * p, 0)
                    to = out + (hk * GROUP + i) * D + tl.arange(0, WIDE)
                    inside = tl.arange(0, WIDE) < D
                    tl.store(to, o.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _read_rows(
    q, k_ptr, v_ptr, log_count, start, end, first, low, high, scale,
    D: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """One query [1, D] over entries: m_i, l_i [1] and acc [1, D].

    Every row of a step's entries keeps a maximum and sums of its own: threads meet at the end only.
    """
    m_i = tl.full([BLOCK], LOWEST, tl.float32)
    l_i = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, WIDE], tl.float32)
    k, v, bias = _load_entries(
        k_ptr, v_ptr, log_count, start, end, first, low, high, D, WIDE, BLOCK, WEIGHTED
    )
    for n in range(start, end, BLOCK):
        s = tl.sum(q * k.to(tl.float32), 1) * scale + bias
        v_now = v.to(tl.float32)
        k, v, bias = _load_entries(
            k_ptr, v_ptr, log_count, n + BLOCK, end, first, low, high, D, WIDE, BLOCK, WEIGHTED
        )
        m_new = tl.maximum(m_i, s)
        alpha, p = tl.exp(m_i - m_new), tl.exp(s - m_new)
        l_i = l_i * alpha + p
        acc = acc * alpha[:, None] + p[:, None] * v_now
        m_i = m_new
    m = tl.max(m_i, 0)
    p = tl.exp(m_i - m)
    total = tl.sum(acc * p[:, None], 0)[None, :]
    return tl.full([1], 0, tl.float32) + m, tl.full([1], 0, tl.float32) + tl.sum(l_i * p, 0), total


@triton.jit
def _read_groups(
    q, k_ptr, v_ptr, log_count, start, end, first, low, high, scale,
    G: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Queries [G, D] that share a key head: m_i, l_i [G] and acc [G, D]."""
    m_i = tl.full([G], LOWEST, tl.float32)
    l_i = tl.zeros([G], tl.float32)
    acc = tl.zeros([G, WIDE], tl.float32)
    for n in range(start, end, BLOCK):
        k, v, bias = _load_entries(
            k_ptr, v_ptr, log_count, n, end, first, low, high, D, WIDE, BLOCK, WEIGHTED
        )
        s = tl.sum(q[:, None, :] * k.to(tl.float32)[None, :, :], 2) * scale + bias[None, :]
        m_new = tl.maximum(m_i, tl.max(s, 1))
        p, alpha = tl.exp(s - m_new[:, None]), tl.exp(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        update = tl.sum(p[:, :, None] * v.to(tl.float32)[None, :, :], 1)
        acc = acc * alpha[:, None] + update
        m_i = m_new
    return m_i, l_i, acc


@triton.jit
def _load_entries(
    k_ptr, v_ptr, log_count, n, end, first, low, high,
    D: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """A step's keys, values and log-weights, which rule out what lies behind the end."""
    index = n + tl.arange(0, BLOCK)
    here = index < end
    index += tl.where(index < first, low, high)
    offs_d = tl.arange(0, WIDE)[None, :]
    at = index.to(tl.int64)[:, None] * D + offs_d
    mask = here[:, None] & (offs_d < D)
    k = tl.load(k_ptr + at, mask=mask, other=0.0)
    v = tl.load(v_ptr + at, mask=mask, other=0.0)
    bias = tl.where(here, 0.0, 2 * LOWEST)
    if WEIGHTED:
        bias += tl.maximum(tl.load(log_count + index, mask=here, other=0.0), LOWEST)
    return k, v, bias


@triton.jit
def rotated(x, cos, sin, offs_d, mask, D: tl.constexpr, ROPE: tl.constexpr):
    """x[offs_d], rotated and rounded as it is kept, in float32."""
    value = tl.load(x + offs_d, mask=mask, other=0.0)
    if ROPE == "":
        return value.to(tl.float32)
    else:
        other = (offs_d ^ 1) if ROPE == "pairs" else (offs_d + D // 2) % D
        partner = tl.load(x + other, mask=mask, other=0.0).to(tl.float32)
        there = offs_d < D
        turned = value.to(tl.float32) * tl.load(cos + offs_d, mask=there, other=0.0)
        turned += partner * tl.load(sin + offs_d, mask=there, other=0.0)
        return turned.to(value.dtype).to(tl.float32)
