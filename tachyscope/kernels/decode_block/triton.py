"""A block of the depth transformer for one position in one launch (Triton).

As many programs as the GPU runs at once go through its five parts: queries, keys and values;
attention over the few positions; its projection; both halves of the MLP. They wait for each other
in between, the first weights of the next part already under way. A program norms the input for
itself, once a part, into memory that a few share, who all write the same: that is less work than
at every tile.

All launches of a device must come by one CUDA stream (see `decode_mlp`).
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tachyscope.kernels.decode_attention.step import Step
from tachyscope.kernels.decode_block.block import BlockMemory, BlockWeights
from tachyscope.kernels.decode_mlp.triton import MlpSetting, norm_rows, registers, wait_for_all
from tachyscope.kernels.device import multiprocessors
from tachyscope.kernels.gemv.triton import (
    Setting,
    dot_tile,
    gelu,
    load_tile,
    tile_options,
    words_of_a_step,
)
from tachyscope.kernels.launch import Overlap, launch
from tachyscope.kernels.pdl import wait_for_kernel_before


def setting_for(x: Tensor, block: BlockWeights) -> MlpSetting:
    """What was fastest on an H200 (scripts/choose_decode.py); `first` cuts what reads the width."""
    tokens, up, down = len(x), block.mlp.up, block.mlp.down
    processors = multiprocessors(x.device)
    if tokens > 2:
        return MlpSetting(Setting(16, 128, 8), Setting(16, 256, 8), processors)
    # three matrices' first steps are held at once: half of what a step else has
    first, last = words_of_a_step(up) // 2, words_of_a_step(down)
    rows, each = (2, 3) if up.bits == 4 and tokens == 2 else (4, 5)
    return MlpSetting(Setting(rows, first, 4), Setting(rows, last, 4), each * processors)


def decode_block(
    x: Tensor,
    block: BlockWeights,
    step: Step,
    memory: BlockMemory,
    barriers: Tensor,
    setting: MlpSetting | None = None,
    launches: int = 1,
) -> None:
    """`decode_block`; with 5 launches no program waits for another, as an interpreter needs."""
    width, held, mlp = x.shape[1], step.entries, block.mlp
    made = setting or setting_for(x, block)
    linears = (*block.qkv, block.out, mlp.up, mlp.down)
    norms = (block.norm.weight, block.norm.bias, mlp.norm.weight, mlp.norm.bias)
    slots, d = held.k.shape[2:]
    for phase in (0,) if launches == 1 else range(1, 6):
        launch(
            _decode_block, (made.programs,),
            x, memory.qkv, memory.attended, memory.inner, memory.normed, barriers, held.slot,
            held.k, held.v, *(part.data for part in linears),
            *(x if part.scale is None else part.scale for part in linears),
            *(part.bias for part in linears), *norms, block.norm.eps, mlp.norm.eps,
            K=width, INNER=mlp.up.rows, HEADS=step.heads, D=d, WIDE=triton.next_power_of_2(d),
            COPIES=len(memory.normed), SLOTS=slots, POSITIONS=triton.next_power_of_2(slots),
            PHASE=phase, BLOCK_N2=made.last.block_n, BLOCK_K2=made.last.block_k,
            maxnreg=registers(made, multiprocessors(x.device)),
            **tile_options(x, mlp.up, None, made.first), **Overlap.options(x),
        )  # fmt: skip


# one program for all blocks and positions
@triton.jit(do_not_specialize=["eps", "mlp_eps", "barrier", "slot_ptr"])
def _decode_block(
    x, qkv, attended, inner, normed, barrier, slot_ptr, k_ptr, v_ptr,
    w_q, w_k, w_v, w_o, w_up, w_down,
    s_q, s_k, s_v, s_o, s_up, s_down, b_q, b_k, b_v, b_o, b_up, b_down,
    norm_w, norm_b, mlp_norm_w, mlp_norm_b, eps, mlp_eps,
    K: tl.constexpr, INNER: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    WIDE: tl.constexpr, COPIES: tl.constexpr, SLOTS: tl.constexpr, POSITIONS: tl.constexpr,
    PHASE: tl.constexpr, PDL: tl.constexpr, TOKENS: tl.constexpr, R: tl.constexpr,
    NORM: tl.constexpr, NORM_BLOCK: tl.constexpr, BITS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_N2: tl.constexpr, BLOCK_K2: tl.constexpr,
):  # fmt: skip
    WORDS: tl.constexpr = K if BITS == 16 else K // (32 // BITS)
    INNER_WORDS: tl.constexpr = INNER if BITS == 16 else INNER // (32 // BITS)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    normed += (pid % COPIES) * TOKENS * K
    first = pid * BLOCK_N
    if PHASE == 0 or PHASE == 1:
        # under way before the kernel before has ended
        ahead_q = load_tile(w_q, first, 0, K, WORDS, BLOCK_N, BLOCK_K)
        ahead_k = load_tile(w_k, first, 0, K, WORDS, BLOCK_N, BLOCK_K)
        ahead_v = load_tile(w_v, first, 0, K, WORDS, BLOCK_N, BLOCK_K)
    wait_for_kernel_before(PDL)
    if PHASE == 0 or PHASE == 1:
        norm_rows(normed, x, norm_w, norm_b, eps, K, TOKENS, "layer", NORM_BLOCK)
        _rows(
            qkv, 3 * K, normed, w_q, s_q, b_q, ahead_q, pid, programs, K, K,
            False, False, TOKENS, R, BITS, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        _rows(
            qkv + K, 3 * K, normed, w_k, s_k, b_k, ahead_k, pid, programs, K, K,
            False, False, TOKENS, R, BITS, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        _rows(
            qkv + 2 * K, 3 * K, normed, w_v, s_v, b_v, ahead_v, pid, programs, K, K,
            False, False, TOKENS, R, BITS, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    ahead = load_tile(w_o, first, 0, K, WORDS, BLOCK_N, BLOCK_K)
    if PHASE == 0:
        wait_for_all(barrier, programs)
    if PHASE == 0 or PHASE == 2:
        slot = tl.load(slot_ptr)
        for head in range(pid, TOKENS * HEADS, programs):
            _attend(attended, qkv, k_ptr, v_ptr, head, slot, K, HEADS, D, WIDE, SLOTS, POSITIONS)
    if PHASE == 0:
        wait_for_all(barrier + 1, programs)
    if PHASE == 0 or PHASE == 3:
        _rows(
            x, K, attended, w_o, s_o, b_o, ahead, pid, programs, K, K,
            True, False, TOKENS, R, BITS, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    ahead = load_tile(w_up, first, 0, INNER, WORDS, BLOCK_N, BLOCK_K)
    if PHASE == 0:
        wait_for_all(barrier + 2, programs)
    if PHASE == 0 or PHASE == 4:
        norm_rows(normed, x, mlp_norm_w, mlp_norm_b, mlp_eps, K, TOKENS, "layer", NORM_BLOCK)
        _rows(
            inner, INNER, normed, w_up, s_up, b_up, ahead, pid, programs, INNER, K,
            False, True, TOKENS, R, BITS, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    ahead2 = load_tile(w_down, pid * BLOCK_N2, 0, K, INNER_WORDS, BLOCK_N2, BLOCK_K2)
    if PHASE == 0:
        wait_for_all(barrier + 3, programs)
    if PHASE == 0 or PHASE == 5:
        _rows(
            x, K, inner, w_down, s_down, b_down, ahead2, pid, programs, K, INNER,
            True, False, TOKENS, R, BITS, BLOCK_N2, BLOCK_K2,
        )  # fmt: skip


@triton.jit
def _rows(
    out, out_row, x, w, scale, bias, ahead, pid, programs, N: tl.constexpr, K: tl.constexpr,
    ADD: tl.constexpr, GELU: tl.constexpr, TOKENS: tl.constexpr, R: tl.constexpr,
    BITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A program's rows of w · x + bias, for all tokens; `ahead` is the first step of the first."""
    token = tl.arange(0, R)[None, :]
    for tile in range(pid, tl.cdiv(N, BLOCK_N), programs):
        offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (offs_n < N)[:, None] & (token < TOKENS)
        to = out + token * out_row + offs_n[:, None]
        # what does not depend on the product is under way while it is made
        shift = tl.load(bias + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
        if ADD:
            total = tl.load(to, mask=mask, other=0.0).to(tl.float32)
        y, _, ahead, _ = dot_tile(
            x, w, w, scale, scale, ahead, ahead, tile * BLOCK_N, (tile + programs) * BLOCK_N, N, N,
            (0.0, 1.0, 0.0, 1.0), bias, bias, K, False, TOKENS, R, "", BITS, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        y += shift[:, None]
        if GELU:
            y = gelu(y)
        if ADD:
            # rounded as it would be on its own, then added
            y = y.to(out.dtype.element_ty).to(tl.float32) + total
        tl.store(to, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _attend(
    out, qkv, k_ptr, v_ptr, head, slot, K: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    WIDE: tl.constexpr, SLOTS: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """One head of one token over the positions before it and its own, which is kept."""
    b, h = head // HEADS, head % HEADS
    offs_d, at = tl.arange(0, WIDE), tl.arange(0, POSITIONS)
    inside = offs_d < D
    qkv += b * 3 * K + h * D + offs_d
    q = tl.load(qkv, mask=inside, other=0.0).to(tl.float32)
    own_k = tl.load(qkv + K, mask=inside, other=0.0)
    own_v = tl.load(qkv + 2 * K, mask=inside, other=0.0)
    entry = head * SLOTS * D + offs_d
    held = entry[None, :] + at[:, None] * D
    seen = (at < slot)[:, None] & inside[None, :]
    k = tl.load(k_ptr + held, mask=seen, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + held, mask=seen, other=0.0).to(tl.float32)
    tl.store(k_ptr + entry + slot * D, own_k, mask=inside)
    tl.store(v_ptr + entry + slot * D, own_v, mask=inside)
    scale = 1.0 / tl.sqrt(D * 1.0)
    s = tl.where(at < slot, tl.sum(q[None, :] * k, 1) * scale, -float("inf"))
    own = tl.sum(q * own_k.to(tl.float32)) * scale
    m = tl.maximum(tl.max(s, 0), own)
    p, own_p = tl.exp(s - m), tl.exp(own - m)
    o = tl.sum(p[:, None] * v, 0) + own_p * own_v.to(tl.float32)
    o = o / (tl.sum(p, 0) + own_p)
    tl.store(out + b * K + h * D + offs_d, o.to(out.dtype.element_ty), mask=inside)
