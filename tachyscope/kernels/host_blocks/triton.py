"""Blocks between a GPU's cache and pinned host memory, which the kernels address themselves.

One program moves one block of one head, so a block is one piece on the bus. The host has no part in
it, so that launches can be recorded in a CUDA graph.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tachyscope.kernels.codes.torch import FP16_LEAST, INT4_LARGEST
from tachyscope.kernels.host_blocks.torch import HostBlocks
from tachyscope.kernels.launch import launch

LEAST, LARGEST = tl.constexpr(FP16_LEAST), tl.constexpr(INT4_LARGEST)


def store_blocks(x: Tensor, host: HostBlocks, ids: Tensor) -> None:
    rows, heads, n, _ = x.shape
    if ids.numel():
        launch(
            _store, (ids.shape[2], rows * heads),
            x, *_parts(host), ids, *x.stride()[:3], host.code.shape[2], ids.shape[2], heads, n,
            **_options(x, host),
        )  # fmt: skip


def load_blocks(host: HostBlocks, ids: Tensor, out: Tensor) -> None:
    rows, heads = out.shape[:2]
    if ids.numel():
        launch(
            _load, (ids.shape[2], rows * heads),
            out, *_parts(host), ids, *out.stride()[:3], host.code.shape[2], ids.shape[2], heads,
            **_options(out, host),
        )  # fmt: skip


def _parts(host: HostBlocks) -> tuple[Tensor, Tensor]:
    return host.code, host.code if host.scale is None else host.scale


def _options(x: Tensor, host: HostBlocks) -> dict[str, Any]:
    kinds = {torch.int8: 1, torch.uint8: 2}
    width, block = x.shape[3], host.block
    return {
        "KIND": 0 if host.scale is None else kinds[host.code.dtype],
        "HALF": width // 2,
        "GROUPS": 1 if host.scale is None else host.scale.shape[4],
        "BLOCK": block,
        "N": triton.next_power_of_2(block),
        "W": triton.next_power_of_2(width // 2),
        "num_warps": 8,
    }


@triton.jit(do_not_specialize=["most", "count", "heads", "n"])
def _store(
    x, code, scale, ids, x_b, x_h, x_n, most, count, heads, n,
    KIND: tl.constexpr, HALF: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
    N: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    i, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = row // heads, row % heads
    to = row * most + tl.load(ids + row * count + i).to(tl.int64)
    at, offs_d = tl.arange(0, N), tl.arange(0, W)
    entry = i * BLOCK + at
    inside = ((at < BLOCK) & (entry < n))[:, None] & (offs_d < HALF)[None, :]
    x += b * x_b + h * x_h + entry.to(tl.int64)[:, None] * x_n + offs_d[None, :]
    low = tl.load(x, mask=inside, other=0.0)
    high = tl.load(x + HALF, mask=inside, other=0.0)
    if KIND == 0:
        code += (to * BLOCK + at)[:, None] * (2 * HALF) + offs_d[None, :]
        tl.store(code, low, mask=inside)
        tl.store(code + HALF, high, mask=inside)
    else:
        low, high = low.to(tl.float32), high.to(tl.float32)
        kept = (at < BLOCK) & (entry < n)
        if KIND == 1:
            most_of = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
            step = tl.maximum(most_of, 1e-12) / 127
            tl.store(scale + to * BLOCK + at, step, mask=kept)
            code += (to * BLOCK + at)[:, None] * (2 * HALF) + offs_d[None, :]
            tl.store(code, tl.floor(low / step[:, None] + 0.5).to(tl.int8), mask=inside)
            tl.store(code + HALF, tl.floor(high / step[:, None] + 0.5).to(tl.int8), mask=inside)
        else:
            SIZE: tl.constexpr = 2 * HALF // GROUPS
            step_low, step_high = tl.zeros([N, W], tl.float32), tl.zeros([N, W], tl.float32)
            for g in tl.static_range(GROUPS):
                mine_low = (offs_d // SIZE == g)[None, :]
                mine_high = ((offs_d + HALF) // SIZE == g)[None, :]
                most_of = tl.maximum(
                    tl.max(tl.where(mine_low, tl.abs(low), 0.0), 1),
                    tl.max(tl.where(mine_high, tl.abs(high), 0.0), 1),
                )
                step = tl.maximum(most_of / LARGEST, LEAST).to(tl.float16)
                tl.store(scale + (to * BLOCK + at) * GROUPS + g, step, mask=kept)
                wide = step.to(tl.float32)[:, None]
                step_low = tl.where(mine_low, wide, step_low)
                step_high = tl.where(mine_high, wide, step_high)
            code += (to * BLOCK + at)[:, None] * HALF + offs_d[None, :]
            byte = _nibble(low, step_low) | (_nibble(high, step_high) << 4)
            tl.store(code, byte.to(tl.uint8), mask=inside)


@triton.jit
def _nibble(x, step):
    number = tl.floor(x / tl.where(step > 0, step, 1.0) + 0.5)
    return (tl.minimum(tl.maximum(number, -LARGEST), LARGEST) + 8).to(tl.int32)


@triton.jit(do_not_specialize=["most", "count", "heads"])
def _load(
    out, code, scale, ids, o_b, o_h, o_n, most, count, heads,
    KIND: tl.constexpr, HALF: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
    N: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    i, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    block = tl.load(ids + row * count + i)
    if block >= 0:
        b, h = row // heads, row % heads
        at, offs_d = tl.arange(0, N), tl.arange(0, W)
        entry = (row * most + block.to(tl.int64)) * BLOCK + at
        inside = (at < BLOCK)[:, None] & (offs_d < HALF)[None, :]
        out += b * o_b + h * o_h + (i * BLOCK + at).to(tl.int64)[:, None] * o_n + offs_d[None, :]
        kind = out.dtype.element_ty
        if KIND == 2:
            byte = tl.load(code + entry[:, None] * HALF + offs_d[None, :], mask=inside, other=0)
            byte = byte.to(tl.int32)
            SIZE: tl.constexpr = 2 * HALF // GROUPS
            scale += entry[:, None] * GROUPS
            step = tl.load(scale + (offs_d // SIZE)[None, :], mask=inside, other=0.0)
            low = ((byte & 15) - 8).to(tl.float32) * step.to(tl.float32)
            step = tl.load(scale + ((offs_d + HALF) // SIZE)[None, :], mask=inside, other=0.0)
            high = ((byte >> 4) - 8).to(tl.float32) * step.to(tl.float32)
        else:
            code += entry[:, None] * (2 * HALF) + offs_d[None, :]
            low = tl.load(code, mask=inside, other=0)
            high = tl.load(code + HALF, mask=inside, other=0)
            if KIND == 1:
                step = tl.load(scale + entry, mask=at < BLOCK, other=0.0)[:, None]
                low, high = low.to(tl.float32) * step, high.to(tl.float32) * step
        tl.store(out, low.to(kind), mask=inside)
        tl.store(out + HALF, high.to(kind), mask=inside)
