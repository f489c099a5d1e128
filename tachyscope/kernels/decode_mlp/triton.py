"""An MLP for the tokens of a decode step in one launch (Triton).

As many programs as the GPU runs at once share the first matrices' rows, wait for each other, then
share the last matrix's rows. A flag on the device is read before any weight: where all tokens
replay, the launch adds what was kept and ends.

All launches of a device must come by one CUDA stream: programs of two at once, neither with all of
its own there, would wait for ever.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tachyscope.kernels.decode_mlp.mlp import Error, Kept, MlpWeights
from tachyscope.kernels.device import multiprocessors
from tachyscope.kernels.gemv.triton import (
    Setting,
    dot_tile,
    gelu,
    load_tile,
    norm_args,
    norm_of,
    norm_stats,
    silu,
    tile_options,
    words_of_a_step,
    x_at,
)
from tachyscope.kernels.launch import Overlap, launch
from tachyscope.kernels.pdl import wait_for_kernel_before


class MlpSetting(NamedTuple):
    """How the two products are cut, and how many programs share them, all of them at once.

    prenorm: whether a program norms its input once, into memory, instead of at every tile.
    """

    first: Setting
    last: Setting
    programs: int
    prenorm: bool = False


# by bits, tokens, width, rows of up and of gate: measured on an H200 (scripts/tune_decode.py,
# 2026-11-16), for slices of 7B's MLPs (share 0.75), whose few tiles come out even so
SETTINGS: dict[tuple[int, int, int, int, int], MlpSetting] = {
    (16, 1, 4096, 3008, 2752): MlpSetting(Setting(2, 1024, 4), Setting(4, 1024, 4), 512),
    (8, 1, 4096, 3008, 2752): MlpSetting(Setting(4, 512, 4), Setting(4, 512, 4), 376),
    (4, 1, 4096, 3072, 2752): MlpSetting(Setting(4, 512, 4), Setting(4, 512, 4), 376),
}


def setting_for(mlp: MlpWeights, tokens: int, processors: int) -> MlpSetting:
    """What was measured for such an MLP on as many processors; else what was best on the whole.

    Four warps fit five times with 96 registers, four times with 128.
    """
    gate = 0 if mlp.gate is None else mlp.gate.rows
    key = mlp.up.bits, tokens, mlp.up.columns, mlp.up.rows, gate
    if key in SETTINGS and SETTINGS[key].programs <= 8 * processors:
        return SETTINGS[key]
    if tokens > 2:
        return MlpSetting(Setting(16, 128, 8), Setting(16, 256, 8), processors)
    first, last = (words_of_a_step(weight) for weight in (mlp.up, mlp.down))
    if mlp.up.bits == 4 and tokens == 2:
        return MlpSetting(Setting(2, first, 4), Setting(2, last, 4), 3 * processors, prenorm=True)
    if mlp.up.bits < 16 and tokens == 1:
        return MlpSetting(Setting(4, first, 4), Setting(4, last, 4), 4 * processors, prenorm=True)
    if mlp.up.bits == 16 and mlp.gate is None:
        return MlpSetting(Setting(8, min(first, 512), 4), Setting(4, last, 4), 5 * processors)
    rows, each = 4 if mlp.gate is None else 2, 5 if tokens == 1 else 4
    return MlpSetting(Setting(rows, first, 4), Setting(4, last, 4), each * processors)


def decode_mlp(
    x: Tensor,
    mlp: MlpWeights,
    kept: Kept | Error | None,
    inner: Tensor,
    barrier: Tensor,
    tokens: int = 1,
    normed: Tensor | None = None,
    setting: MlpSetting | None = None,
    launches: int = 1,
) -> None:
    """`decode_mlp`; with 2 launches no program waits for another, as an interpreter needs."""
    rows, width = x.shape
    up, down, gated = mlp.up, mlp.down, mlp.gate is not None
    processors = multiprocessors(x.device)
    made = setting or setting_for(mlp, rows, processors)
    gate = mlp.gate or up
    skip = place = ready = barrier
    age = output = drift = base = fade = x
    rate, places, drifts, stores = 0.0, 0, False, False
    if isinstance(kept, Error):
        place, output, base = kept.place, kept.error, kept.input
        fade, rate, places = kept.fade, kept.beta, kept.error.shape[1]
    elif kept is not None:
        skip, place, output, age = kept.skip, kept.place, kept.output, kept.age
        rate, places = 1 / kept.memory, kept.output.shape[1]
        drifts, stores = kept.drift is not None, kept.input is not None
        drift = x if kept.drift is None else kept.drift
        ready = barrier if kept.ready is None else kept.ready
        base = x if kept.input is None else kept.input
    kinds = tile_options(x, up, mlp.norm, made.first)
    kinds |= {"BLOCK_N2": made.last.block_n, "BLOCK_K2": made.last.block_k}
    for phase in (0,) if launches == 1 else (1, 2):
        launch(
            _decode_mlp, (made.programs,),
            x, inner, x if normed is None else normed, barrier, gate.data, up.data, down.data,
            *(x if w.scale is None else w.scale for w in (gate, up, down)),
            *(x if w.bias is None else w.bias for w in (up, down)),
            *norm_args(mlp.norm, x), skip, place, output, age, drift, ready, base, fade, rate,
            places, K=width, INNER=up.rows, NEURONS=up.rows - mlp.linear, GATED=gated,
            UP_BIAS=up.bias is not None, DOWN_BIAS=down.bias is not None,
            KEPT=isinstance(kept, Kept), DRIFT=drifts, STORE_INPUT=stores,
            ERROR=isinstance(kept, Error), PHASE=phase,
            COPIES=0 if normed is None or not made.prenorm else len(normed),
            maxnreg=registers(made, processors), **kinds, **Overlap.options(x),
        )  # fmt: skip


def registers(setting: MlpSetting, processors: int) -> int:
    """The most that a thread may take so that all programs are there at once."""
    threads = 32 * setting.first.warps * triton.cdiv(setting.programs, processors)
    return min(255, 65536 // threads // 8 * 8)


# one program for all layers: flags and numbers lie side by side, few of them aligned
@triton.jit(do_not_specialize=["eps", "barrier", "skip", "place", "ready", "rate"])
def _decode_mlp(
    x, inner, normed, barrier, gate, up, down, gate_scale, up_scale, down_scale, up_bias, down_bias,
    norm_w, norm_b, eps, skip, place, output, age, drift, ready, base, fade, rate, places,
    K: tl.constexpr, INNER: tl.constexpr, NEURONS: tl.constexpr, GATED: tl.constexpr,
    UP_BIAS: tl.constexpr, DOWN_BIAS: tl.constexpr, KEPT: tl.constexpr, DRIFT: tl.constexpr,
    STORE_INPUT: tl.constexpr, ERROR: tl.constexpr, PHASE: tl.constexpr, COPIES: tl.constexpr,
    PDL: tl.constexpr,
    TOKENS: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr, NORM_BLOCK: tl.constexpr,
    BITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_N2: tl.constexpr, BLOCK_K2: tl.constexpr,
):  # fmt: skip
    WORDS: tl.constexpr = K if BITS == 16 else K // (32 // BITS)
    INNER_WORDS: tl.constexpr = INNER if BITS == 16 else INNER // (32 // BITS)
    IN: tl.constexpr = NORM if COPIES == 0 else ""  # the norm that is left to a tile
    pid, programs = tl.program_id(0), tl.num_programs(0)
    if not KEPT and PHASE != 2:
        # under way before the kernel before has ended; where a flag may skip them they wait for it
        ahead = load_tile(up, pid * BLOCK_N, 0, INNER, WORDS, BLOCK_N, BLOCK_K)
        ahead_pair = ahead
        if GATED:
            ahead_pair = load_tile(gate, pid * BLOCK_N, 0, NEURONS, WORDS, BLOCK_N, BLOCK_K)
    wait_for_kernel_before(PDL)
    token = tl.arange(0, R)
    there = token < TOKENS
    replayed = token < 0
    at = token.to(tl.int64) * 0
    computing = TOKENS
    if KEPT:
        replayed = tl.load(skip + token, mask=there, other=1) != 0
        computing = tl.sum((~replayed).to(tl.int32))
    if KEPT or ERROR:
        at = token.to(tl.int64) * places + tl.load(place)
    if computing > 0:
        if PHASE != 2:
            if KEPT:
                ahead = load_tile(up, pid * BLOCK_N, 0, INNER, WORDS, BLOCK_N, BLOCK_K)
                ahead_pair = ahead
                if GATED:
                    ahead_pair = load_tile(gate, pid * BLOCK_N, 0, NEURONS, WORDS, BLOCK_N, BLOCK_K)
            read = x
            if COPIES > 0:
                read = normed + (pid % COPIES) * TOKENS * K
                norm_rows(read, x, norm_w, norm_b, eps, K, TOKENS, NORM, NORM_BLOCK)
            stats = norm_stats(read, eps, K, TOKENS, R, IN, NORM_BLOCK, BLOCK_K)
            for tile in range(pid, tl.cdiv(INNER, BLOCK_N), programs):
                offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
                mask = offs_n < INNER
                u, g, ahead, ahead_pair = dot_tile(
                    read, up, gate, up_scale, gate_scale, ahead, ahead_pair,
                    tile * BLOCK_N, (tile + programs) * BLOCK_N, INNER, NEURONS, stats,
                    norm_w, norm_b, K, GATED, TOKENS, R, IN, BITS, BLOCK_N, BLOCK_K,
                )  # fmt: skip
                if UP_BIAS:
                    u += tl.load(up_bias + offs_n, mask=mask, other=0.0).to(tl.float32)[:, None]
                if GATED:  # noqa: SIM108 - known when compiled
                    h = silu(g) * u
                else:
                    h = gelu(u)
                if NEURONS < INNER:
                    h = tl.where((offs_n < NEURONS)[:, None], h, u)
                to = inner + token[None, :] * INNER + offs_n[:, None]
                tl.store(to, h.to(inner.dtype.element_ty), mask=mask[:, None] & there[None, :])
            # by the program that has least to do
            if STORE_INPUT or ERROR:  # noqa: SIM102 - one is known when compiled
                if pid == programs - 1:
                    meet_input(
                        x, base, fade, place, places, rate, eps, norm_w, norm_b, K, TOKENS, NORM,
                        NORM_BLOCK, ERROR,
                    )  # fmt: skip
        ahead2 = load_tile(down, pid * BLOCK_N2, 0, K, INNER_WORDS, BLOCK_N2, BLOCK_K2)
        if PHASE == 0:
            wait_for_all(barrier, programs)
        if PHASE != 1:
            for tile in range(pid, tl.cdiv(K, BLOCK_N2), programs):
                offs_n = tile * BLOCK_N2 + tl.arange(0, BLOCK_N2)
                mask = (offs_n < K)[:, None] & there[None, :]
                held = output + at[None, :] * K + offs_n[:, None]
                stream = x + token[None, :] * K + offs_n[:, None]
                # what does not depend on the product is under way while it is made
                total = tl.load(stream, mask=mask, other=0.0).to(tl.float32)
                if DOWN_BIAS:
                    bias = tl.load(down_bias + offs_n, mask=offs_n < K, other=0.0).to(tl.float32)
                if ERROR:
                    error = tl.load(held, mask=mask, other=0.0).to(tl.float32)
                    error *= tl.load(fade + token, mask=there, other=0.0)[None, :]
                if KEPT:
                    wanted = mask if DRIFT else mask & replayed[None, :]
                    old = tl.load(held, mask=wanted, other=0.0)
                y, _, ahead2, _ = dot_tile(
                    inner, down, down, down_scale, down_scale, ahead2, ahead2,
                    tile * BLOCK_N2, (tile + programs) * BLOCK_N2, K, K, (0.0, 1.0, 0.0, 1.0),
                    norm_w, norm_b, INNER, False, TOKENS, R, "", BITS, BLOCK_N2, BLOCK_K2,
                )  # fmt: skip
                if DOWN_BIAS:
                    y += bias[:, None]
                if ERROR:
                    y += error
                y = y.to(x.dtype.element_ty)
                if KEPT:
                    if DRIFT:
                        follow = drift + token[None, :] * K + offs_n[:, None]
                        mean = tl.load(follow, mask=mask, other=0.0).to(tl.float32)
                        change = y.to(tl.float32) - old.to(tl.float32)
                        learns = mask & (tl.where(replayed, 0, tl.load(ready)) != 0)[None, :]
                        new = mean + rate * (change - mean)
                        tl.store(follow, new.to(drift.dtype.element_ty), mask=learns)
                        old = (old.to(tl.float32) + mean).to(old.dtype)
                    y = tl.where(replayed[None, :], old, y)
                    tl.store(held, y, mask=mask)
                tl.store(stream, (total + y.to(tl.float32)).to(x.dtype.element_ty), mask=mask)
    elif PHASE != 1:
        for tile in range(pid, tl.cdiv(K, 128), programs):
            offs_n = tile * 128 + tl.arange(0, 128)
            mask = (offs_n < K)[:, None] & there[None, :]
            held = output + at[None, :] * K + offs_n[:, None]
            y = tl.load(held, mask=mask, other=0.0)
            if DRIFT:
                follow = drift + token[None, :] * K + offs_n[:, None]
                mean = tl.load(follow, mask=mask, other=0.0).to(tl.float32)
                y = (y.to(tl.float32) + mean).to(y.dtype)
                tl.store(held, y, mask=mask)
            _add(x + token[None, :] * K + offs_n[:, None], y, mask)
    if KEPT:  # noqa: SIM102 - one is known when compiled
        if (pid == 0) & (PHASE != 1):
            old_age = tl.load(age + at, mask=there, other=0)
            tl.store(age + at, tl.where(replayed, old_age + 1, 0), mask=there)


@triton.jit
def norm_rows(
    to, x, norm_w, norm_b, eps, K: tl.constexpr, TOKENS: tl.constexpr, NORM: tl.constexpr,
    NORM_BLOCK: tl.constexpr,
):  # fmt: skip
    """Every token's norm, which the whole program can read after."""
    offs = tl.arange(0, NORM_BLOCK)
    for token in tl.static_range(TOKENS):
        mean, rstd = norm_of(x + token * K, K, eps, NORM, NORM_BLOCK)
        a = x_at(x + token * K, offs, offs < K, mean, rstd, norm_w, norm_b, NORM)
        if NORM == "rms":
            a *= rstd
        tl.store(to + token * K + offs, a.to(to.dtype.element_ty), mask=offs < K)
    tl.debug_barrier()


@triton.jit
def meet_input(
    x, base, fade, place, places, beta, eps, norm_w, norm_b, K: tl.constexpr, TOKENS: tl.constexpr,
    NORM: tl.constexpr, NORM_BLOCK: tl.constexpr, COMPARE: tl.constexpr,
):  # fmt: skip
    """Keep norm(x) at the tokens' place; or compare it with what lies there, for `fade`."""
    offs = tl.arange(0, NORM_BLOCK)
    inside = offs < K
    for token in tl.static_range(TOKENS):
        mean, rstd = norm_of(x + token * K, K, eps, NORM, NORM_BLOCK)
        a = x_at(x + token * K, offs, inside, mean, rstd, norm_w, norm_b, NORM)
        if NORM == "rms":
            a *= rstd
        a = a.to(base.dtype.element_ty)
        held = base + (token * places + tl.load(place)).to(tl.int64) * K + offs
        if COMPARE:
            old = tl.load(held, mask=inside, other=0.0).to(tl.float32)
            change = tl.where(inside, a.to(tl.float32) - old, 0.0)
            size = tl.maximum(tl.sum(old * old), 1e-12)
            tl.store(fade + token, tl.exp(-beta * tl.sum(change * change) / size))
        else:
            tl.store(held, a, mask=inside)


@triton.jit
def _add(x, y, mask):
    total = tl.load(x, mask=mask, other=0.0).to(tl.float32) + y.to(tl.float32)
    tl.store(x, total.to(x.dtype.element_ty), mask=mask)


@triton.jit
def wait_for_all(barrier, programs):
    """Until every program has come here; what they wrote before can be read after."""
    tl.debug_barrier()
    tl.atomic_add(barrier, 1, sem="acq_rel", scope="gpu")
    while tl.atomic_add(barrier, 0, sem="acquire", scope="gpu") < programs:
        pass
    tl.debug_barrier()
