"""A decision by inputs in one launch of one program (Triton)."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tachyscope.kernels.gemv.triton import norm_args, norm_of, x_at
from tachyscope.kernels.gemv.weights import Norm
from tachyscope.kernels.input_gate.gate import InputGate
from tachyscope.kernels.launch import Overlap, launch
from tachyscope.kernels.pdl import wait_for_kernel_before


def input_gate(x: Tensor, norm: Norm, gate: InputGate) -> None:
    """`input_gate`; all tensors are contiguous."""
    rows, places, width = gate.input.shape
    optional = (x if part is None else part for part in (gate.credit, gate.recent, gate.due))
    launch(
        _input_gate, (1,),
        x, gate.input, *norm_args(norm, x), gate.place, gate.ready, gate.skip, gate.counts,
        *optional, gate.limit, gate.dearest, rows // 2 if gate.paired else rows, places,
        KIND=gate.kind, PAIRED=gate.paired, K=width, BLOCK=triton.next_power_of_2(width),
        PLACES=triton.next_power_of_2(places), NORM="rms" if norm.bias is None else "layer",
        num_warps=8, **Overlap.options(x),
    )  # fmt: skip


# one program for all layers: flags and numbers lie side by side, few of them aligned
@triton.jit(
    do_not_specialize=[
        "eps", "place_ptr", "ready_ptr", "skip", "counts", "credit", "due", "limit", "dearest",
        "groups", "places",
    ]
)  # fmt: skip
def _input_gate(
    x, base, norm_w, norm_b, eps, place_ptr, ready_ptr, skip, counts, credit, recent, due, limit,
    dearest, groups, places,
    KIND: tl.constexpr, PAIRED: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    PLACES: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_kernel_before(PDL)
    place, ready = tl.load(place_ptr), tl.load(ready_ptr) != 0
    skipped = 0
    for row in range(groups):
        change = _change(x, base, row, place, places, eps, norm_w, norm_b, K, BLOCK, NORM)
        if PAIRED:
            other = _change(
                x, base, row + groups, place, places, eps, norm_w, norm_b, K, BLOCK, NORM
            )
            change = 0.5 * (change + other)
        for half in tl.static_range(2 if PAIRED else 1):
            at = row + half * groups
            if KIND == "threshold":
                replay = change <= limit
            elif KIND == "share":
                offs = tl.arange(0, PLACES)
                ring = tl.load(recent + at * places + offs, mask=offs < places, other=float("nan"))
                known = tl.sum((ring == ring).to(tl.float32))
                higher = tl.sum((ring > -change).to(tl.float32))
                owed = tl.load(due + at)
                replay = higher + 0.5 < owed * (known + 1.0)
                owed += (tl.where(replay, 0.0, 1.0) - (1.0 - limit)) / places
                tl.debug_barrier()
                tl.store(due + at, owed, mask=ready)
                tl.store(recent + at * places + place, -change, mask=ready)
            else:
                price = change * change
                left = tl.minimum(tl.load(credit + at) + limit, limit * places)
                replay = (price <= left) & (price <= dearest * limit)
                tl.debug_barrier()
                tl.store(credit + at, left - tl.where(replay, price, 0.0), mask=ready)
            replay = replay & ready
            tl.store(skip + at, replay.to(tl.int32))
            skipped += replay.to(tl.int32)
            if not replay:
                _keep(x, base, at, place, places, eps, norm_w, norm_b, K, BLOCK, NORM)
    which = tl.where(skipped == groups * (2 if PAIRED else 1), 0, 1)
    tl.store(counts + which, tl.load(counts + which) + skipped)


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
