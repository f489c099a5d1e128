"""Blocks between a GPU's cache and pinned host memory, which the kernels address themselves.

The host has no part in it, so that launches can be recorded in a CUDA graph. A few programs take
the blocks by turns, as many as keep the bus busy: the other multiprocessors go on computing. On an
H200 16 programs move int4 at 20 GB/s and 64 at 43, int8 at 42 and 48, as it is at 50 and 49.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tachyscope.kernels.codes.torch import FP16_LEAST, FP16_MOST
from tachyscope.kernels.host_blocks.torch import HostBlocks
from tachyscope.kernels.launch import launch

LEAST, MOST = tl.constexpr(FP16_LEAST), tl.constexpr(FP16_MOST)
LEVELS = tl.constexpr(15.0)
PROGRAMS = 64


def store_blocks(k: Tensor, v: Tensor, slots: Tensor, host: HostBlocks, ids: Tensor) -> None:
    _copy(_store, k, v, slots.contiguous(), host, ids.contiguous())


def load_blocks(host: HostBlocks, ids: Tensor, k: Tensor, v: Tensor) -> None:
    _copy(_load, k, v, ids, host, ids)


def _copy(kernel: Any, k: Tensor, v: Tensor, slots: Tensor, host: HostBlocks, ids: Tensor) -> None:
    assert k.stride() == v.stride() and ids.is_contiguous()
    kinds = {torch.int8: 1, torch.uint8: 2}
    coded, (rows, heads, count), width = host.k_scale is not None, ids.shape, k.shape[3]
    launch(
        kernel, (min(PROGRAMS, ids.numel()),),
        k, v, host.k, host.v, host.k_scale if coded else host.k, host.v_scale if coded else host.v,
        slots, ids, *k.stride()[:3], host.k.shape[2], count, heads, rows * heads * count,
        KIND=kinds[host.k.dtype] if coded else 0, HALF=width // 2,
        BLOCK=host.block, N=triton.next_power_of_2(host.block),
        W=triton.next_power_of_2(width // 2), num_warps=8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["most", "count", "heads", "total"])
def _store(
    k, v, k_code, v_code, k_scale, v_scale, slots, ids, x_b, x_h, x_n, most, count, heads, total,
    KIND: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    N: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    for i in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        row = (i // count).to(tl.int64)
        at = (row // heads) * x_b + (row % heads) * x_h
        at += tl.load(slots + i).to(tl.int64) * BLOCK * x_n
        to = row * most + tl.load(ids + i).to(tl.int64)
        _encode(k + at, k_code, k_scale, to, x_n, KIND, HALF, BLOCK, N, W)
        _encode(v + at, v_code, v_scale, to, x_n, KIND, HALF, BLOCK, N, W)


@triton.jit
def _encode(
    x, code, scale, to, x_n, KIND: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    N: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """One block of one head, whole rows at once; of int4 their halves, which share bytes."""
    at = tl.arange(0, N)
    entry = to * BLOCK + at
    x += at.to(tl.int64)[:, None] * x_n
    if KIND < 2:
        offs_d = tl.arange(0, 2 * W)[None, :]
        inside = (at < BLOCK)[:, None] & (offs_d < 2 * HALF)
        value = tl.load(x + offs_d, mask=inside, other=0.0)
        code += entry[:, None] * (2 * HALF) + offs_d
        if KIND == 1:
            value = value.to(tl.float32)
            step = tl.div_rn(tl.maximum(tl.max(tl.abs(value), 1), 1e-12), 127.0)
            tl.store(scale + entry, step, mask=at < BLOCK)
            value = _round(tl.div_rn(value, step[:, None]))
            tl.store(code, value.to(tl.int8), mask=inside)
        else:
            tl.store(code, value, mask=inside)
    else:
        offs_d = tl.arange(0, W)[None, :]
        rows, inside = (at < BLOCK)[:, None], (at < BLOCK)[:, None] & (offs_d < HALF)
        low = tl.load(x + offs_d, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(x + offs_d + HALF, mask=inside, other=0.0).to(tl.float32)
        scale += to * (4 * HALF)
        low = _number(low, rows, scale, offs_d, HALF)
        high = _number(high, rows, scale + HALF, offs_d, HALF)
        byte = low | (high << 4)
        tl.store(code + entry[:, None] * HALF + offs_d, byte.to(tl.uint8), mask=inside)


@triton.jit
def _number(x, rows, scale, offs_d, HALF: tl.constexpr):
    """Half of the channels of a block x [N, W] as numbers from 0 to 15; a step and a zero of each
    are written."""
    zero = tl.min(tl.where(rows, x, float("inf")), 0)[None, :]
    zero = tl.minimum(tl.maximum(zero, -MOST), MOST).to(tl.float16)
    most = tl.max(tl.where(rows, x, -float("inf")), 0)[None, :]
    step = tl.div_rn(most - zero.to(tl.float32), LEVELS)
    step = tl.maximum(step, LEAST).to(tl.float16)
    tl.store(scale + offs_d, step, mask=offs_d < HALF)
    tl.store(scale + 2 * HALF + offs_d, zero, mask=offs_d < HALF)
    x = _round(tl.div_rn(x - zero.to(tl.float32), step.to(tl.float32)))
    return tl.minimum(tl.maximum(x, 0.0), LEVELS).to(tl.int32)


@triton.jit
def _round(x):
    """To the nearest whole number, ties to even as torch has them, for |x| < 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit(do_not_specialize=["most", "count", "heads", "total"])
def _load(
    k, v, k_code, v_code, k_scale, v_scale, slots, ids, x_b, x_h, x_n, most, count, heads, total,
    KIND: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    N: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Fill the i-th slot of a row with its block; `slots` is not read."""
    for i in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        block = tl.load(ids + i)
        if block >= 0:
            row = (i // count).to(tl.int64)
            to = (row // heads) * x_b + (row % heads) * x_h
            to += (i % count).to(tl.int64) * BLOCK * x_n
            at = row * most + block.to(tl.int64)
            _decode(k + to, k_code, k_scale, at, x_n, KIND, HALF, BLOCK, N, W)
            _decode(v + to, v_code, v_scale, at, x_n, KIND, HALF, BLOCK, N, W)


@triton.jit
def _decode(
    out, code, scale, block, o_n, KIND: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    N: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """One block of one head, as `_encode` wrote it."""
    at = tl.arange(0, N)
    entry = block * BLOCK + at
    out += at.to(tl.int64)[:, None] * o_n
    if KIND < 2:
        offs_d = tl.arange(0, 2 * W)[None, :]
        inside = (at < BLOCK)[:, None] & (offs_d < 2 * HALF)
        value = tl.load(code + entry[:, None] * (2 * HALF) + offs_d, mask=inside, other=0)
        if KIND == 1:
            step = tl.load(scale + entry, mask=at < BLOCK, other=0.0)
            value = value.to(tl.float32) * step[:, None]
        tl.store(out + offs_d, value.to(out.dtype.element_ty), mask=inside)
    else:
        offs_d = tl.arange(0, W)[None, :]
        inside = (at < BLOCK)[:, None] & (offs_d < HALF)
        byte = tl.load(code + entry[:, None] * HALF + offs_d, mask=inside, other=0).to(tl.int32)
        scale += block * (4 * HALF)
        low = _value(byte & 15, scale, offs_d, HALF)
        high = _value(byte >> 4, scale + HALF, offs_d, HALF)
        tl.store(out + offs_d, low.to(out.dtype.element_ty), mask=inside)
        tl.store(out + offs_d + HALF, high.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _value(number, scale, offs_d, HALF: tl.constexpr):
    step = tl.load(scale + offs_d, mask=offs_d < HALF, other=0.0).to(tl.float32)
    zero = tl.load(scale + 2 * HALF + offs_d, mask=offs_d < HALF, other=0.0).to(tl.float32)
    return number.to(tl.float32) * step + zero
