"""A decision about tokens in one launch of one program, or at a kernel's end (Triton)."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tachyscope.kernels.gemv.triton import norm_args, norm_of, x_at
from tachyscope.kernels.gemv.weights import Norm
from tachyscope.kernels.launch import Overlap, launch
from tachyscope.kernels.pdl import wait_for_kernel_before
from tachyscope.kernels.token_gate.gate import MAX_TOKEN_COST, GateState

MOST = tl.constexpr(MAX_TOKEN_COST)
# flags and numbers of all layers lie side by side, few of them aligned
UNALIGNED = ["limit_ptr", "place_ptr", "ready_ptr", "skip", "counts", "due", "credit", "rows"]


def gate_args(state: GateState, none: Tensor) -> tuple[object, ...]:
    """What a kernel that decides takes before its sizes; `none` stands for what there is not."""
    optional = (none if x is None else x for x in (state.recent, state.due, state.credit))
    return (
        state.limit, *state.gate.owed(state.age.shape[1]), state.ready, state.skip, state.counts,
        state.age, *optional,
    )  # fmt: skip


def gate_kinds(state: GateState) -> dict[str, object]:
    """The constants of such a kernel."""
    gate = state.gate
    return {
        "RULE": gate.rule, "STRICT": gate.strict, "TIED": gate.tied, "AGE_LIMIT": gate.age_limit,
        "PLACES": triton.next_power_of_2(state.age.shape[1]),
    }  # fmt: skip


def decide(state: GateState, score: Tensor) -> None:
    """`decide`; all tensors are contiguous."""
    launch(
        _decide, (1,),
        score.float(), *gate_args(state, score), state.place, state.age.shape[1], len(score),
        **gate_kinds(state), num_warps=4,
    )  # fmt: skip


def decide_by_input(x: Tensor, norm: Norm, state: GateState) -> None:
    """`decide_by_input`; all tensors are contiguous."""
    assert state.input is not None
    rows, places, width = state.input.shape
    launch(
        _decide_by_input, (1,),
        x, state.input, *norm_args(norm, x), *gate_args(state, x), state.place, places,
        rows // 2 if state.gate.tied else rows, **gate_kinds(state), K=width,
        BLOCK=triton.next_power_of_2(width), NORM="rms" if norm.bias is None else "layer",
        num_warps=8, **Overlap.options(x),
    )  # fmt: skip


@triton.jit
def replays(
    score, row, limit, computed, replayed, go, age, recent, due, credit, place, places,
    RULE: tl.constexpr, STRICT: tl.constexpr, AGE_LIMIT: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Whether a row's token replays: the rules of `TokenGate`."""
    if RULE == "threshold":
        replay = score > limit if STRICT else score >= limit
    elif RULE == "draw":
        replay = score < limit
    elif RULE == "share":
        offs = tl.arange(0, PLACES)
        ring = tl.load(recent + row * places + offs, mask=offs < places, other=float("nan"))
        known = tl.sum((ring == ring).to(tl.float32))
        higher = tl.sum((ring > score).to(tl.float32))
        owed = tl.load(due + row)
        replay = higher + 0.5 < owed * (known + 1.0)
    else:
        price = score * score
        left = tl.minimum(tl.load(credit + row) + limit, limit * places)
        replay = (price <= left) & (price <= limit * MOST)
    if AGE_LIMIT > 0:
        replay = replay & (tl.load(age + row * places + place) < AGE_LIMIT)
    if RULE == "share":
        tl.debug_barrier()
        tl.store(due + row, owed + tl.where(replay, replayed, computed), mask=go)
        tl.store(recent + row * places + place, score, mask=go)
    elif RULE == "budget":
        tl.debug_barrier()
        tl.store(credit + row, left - tl.where(replay, price, 0.0), mask=go)
    return replay & go


@triton.jit
def decide_rows(
    scores, limit_ptr, computed, replayed, ready_ptr, skip, counts, age, recent, due, credit,
    place, places, rows, HKV: tl.constexpr, PADDED: tl.constexpr, RULE: tl.constexpr,
    STRICT: tl.constexpr, TIED: tl.constexpr, AGE_LIMIT: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Whether each row's token replays, whose score is the sum of HKV numbers; for one program."""
    limit, go = tl.load(limit_ptr), tl.load(ready_ptr) != 0
    skipped = 0
    for row in range(rows):
        score = _sum_of(scores, row, HKV, PADDED)
        if TIED:
            half = rows // 2
            other = tl.where(row < half, row + half, row - half)
            score = 0.5 * (score + _sum_of(scores, other, HKV, PADDED))
        replay = replays(
            score, row, limit, computed, replayed, go, age, recent, due, credit, place, places,
            RULE, STRICT, AGE_LIMIT, PLACES,
        )  # fmt: skip
        tl.store(skip + row, replay.to(tl.int32))
        skipped += replay.to(tl.int32)
    count_skipped(counts, skipped, rows)


@triton.jit
def _sum_of(scores, row, HKV: tl.constexpr, PADDED: tl.constexpr):
    offs = tl.arange(0, PADDED)
    return tl.sum(
        tl.load(scores + row * HKV + offs, mask=offs < HKV, other=0.0, cache_modifier=".cg")
    )


@triton.jit
def count_skipped(counts, skipped, rows):
    which = tl.where(skipped == rows, 0, 1)
    tl.store(counts + which, tl.load(counts + which) + skipped)


@triton.jit(do_not_specialize=[*UNALIGNED, "places"])
def _decide(
    scores, limit_ptr, computed, replayed, ready_ptr, skip, counts, age, recent, due, credit,
    place_ptr, places, rows, RULE: tl.constexpr, STRICT: tl.constexpr, TIED: tl.constexpr,
    AGE_LIMIT: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    decide_rows(
        scores, limit_ptr, computed, replayed, ready_ptr, skip, counts, age, recent, due, credit,
        tl.load(place_ptr), places, rows, 1, 1, RULE, STRICT, TIED, AGE_LIMIT, PLACES,
    )  # fmt: skip


@triton.jit(do_not_specialize=[*UNALIGNED, "eps", "places"])
def _decide_by_input(
    x, base, norm_w, norm_b, eps, limit_ptr, computed, replayed, ready_ptr, skip, counts, age,
    recent, due, credit, place_ptr, places, rows,
    RULE: tl.constexpr, STRICT: tl.constexpr, TIED: tl.constexpr, AGE_LIMIT: tl.constexpr,
    PLACES: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`rows` are a pair's where those decide together."""
    wait_for_kernel_before(PDL)
    limit, place, go = tl.load(limit_ptr), tl.load(place_ptr), tl.load(ready_ptr) != 0
    skipped = 0
    for row in range(rows):
        change = _change(x, base, row, place, places, eps, norm_w, norm_b, K, BLOCK, NORM)
        if TIED:
            other = _change(x, base, row + rows, place, places, eps, norm_w, norm_b, K, BLOCK, NORM)
            change = 0.5 * (change + other)
        for half in tl.static_range(2 if TIED else 1):
            at = row + half * rows
            replay = replays(
                -change, at, limit, computed, replayed, go, age, recent, due, credit, place, places,
                RULE, STRICT, AGE_LIMIT, PLACES,
            )  # fmt: skip
            tl.store(skip + at, replay.to(tl.int32))
            skipped += replay.to(tl.int32)
            if not replay:
                _keep(x, base, at, place, places, eps, norm_w, norm_b, K, BLOCK, NORM)
    count_skipped(counts, skipped, rows * (2 if TIED else 1))


@triton.jit
def _normed(
    x, base, row, eps, norm_w, norm_b, K: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr
):
    """A row's input as it is kept."""
    offs = tl.arange(0, BLOCK)
    mean, rstd = norm_of(x + row * K, K, eps, NORM, BLOCK)
    a = x_at(x + row * K, offs, offs < K, mean, rstd, norm_w, norm_b, NORM)
    if NORM == "rms":
        a *= rstd
    return a.to(base.dtype.element_ty)


@triton.jit
def _change(
    x, base, row, place, places, eps, norm_w, norm_b, K: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """|a - old| / |old|."""
    offs = tl.arange(0, BLOCK)
    a = _normed(x, base, row, eps, norm_w, norm_b, K, BLOCK, NORM).to(tl.float32)
    held = base + (row * places + place).to(tl.int64) * K + offs
    old = tl.load(held, mask=offs < K, other=0.0).to(tl.float32)
    far = tl.where(offs < K, a - old, 0.0)
    return tl.sqrt(tl.sum(far * far)) / tl.maximum(tl.sqrt(tl.sum(old * old)), 1e-12)


@triton.jit
def _keep(
    x, base, row, place, places, eps, norm_w, norm_b, K: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    offs = tl.arange(0, BLOCK)
    a = _normed(x, base, row, eps, norm_w, norm_b, K, BLOCK, NORM)
    tl.store(base + (row * places + place).to(tl.int64) * K + offs, a, mask=offs < K)
