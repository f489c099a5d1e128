"""Queries and entries as float8 codes, in one reading and one writing (Triton)."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tachyscope.kernels.attention.triton import block_sparse_attention
from tachyscope.kernels.attention_fp8.torch import FP8, LARGEST, LEAST, Entries, Listed
from tachyscope.kernels.block_table import Read
from tachyscope.kernels.launch import launch


def quantise_queries(q: Tensor) -> tuple[Tensor, Tensor]:
    """As in torch.py; q may be any part of a chunk."""
    rows, heads, n, width = q.shape
    code = torch.empty(q.shape, dtype=torch.uint8, device=q.device)
    scale = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    launch(
        _queries, (triton.cdiv(n, 64), rows * heads),
        q, code.view(FP8), scale, *q.stride()[:3], heads, n, 1 / (LARGEST * math.sqrt(width)),
        MOST=LARGEST, LEAST=LEAST, D=width, N=64, num_warps=4,
    )  # fmt: skip
    return code.view(FP8), scale


def quantise_entries(
    k: Tensor,
    v: Tensor,
    block: int,
    log_count: Tensor | None = None,
    centre: Tensor | None = None,
) -> Entries:
    """As in torch.py; k and v may be any parts of a cache."""
    rows, heads, n, width = k.shape
    blocks = triton.cdiv(n, block)
    code = torch.empty(2, rows, heads, blocks * block * width, dtype=torch.uint8, device=k.device)
    k_code, v_code = code.view(FP8).unbind()
    entries = Entries(
        k_code.unflatten(2, (-1, width)), v_code.unflatten(2, (-1, width, block)),
        torch.empty(rows, heads, blocks, 2, dtype=torch.float32, device=k.device), block,
    )  # fmt: skip
    w = entries.scale if log_count is None else log_count
    mean = entries.scale if centre is None else centre.contiguous()
    launch(
        _entries, (blocks, rows * heads, 2),
        k, v, w, mean, entries.k, entries.v, entries.scale, *k.stride()[:3], *v.stride()[:3],
        w.stride(0), w.stride(1) if w.shape[1] > 1 else 0, heads, n, blocks * block,
        WEIGHTED=log_count is not None, CENTRED=centre is not None, MOST=LARGEST, LEAST=LEAST,
        D=width, N=block, num_warps=8 if block == 128 else 4,
    )  # fmt: skip
    return entries


def listed_attention_fp8(
    q: Tensor, k: Tensor, v: Tensor, past: Listed, centre: Tensor, kept: tuple[Tensor, ...] = ()
) -> Read:
    """As in torch.py, but the codes are decoded to q's dtype first."""
    held = decode_entries(past.entries, centre, q.dtype)
    return block_sparse_attention(q, k, v, past.table(*held))


def decode_entries(entries: Entries, centre: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values [B, Hkv, slots, D] of codes, in new memory."""
    rows, heads, slots, width = entries.k.shape
    k, v = torch.empty(2, *entries.k.shape, dtype=dtype, device=entries.k.device).unbind()
    launch(
        _vectors, (slots // entries.block, rows * heads),
        entries.k, entries.v, entries.scale, centre.contiguous(), k, v, slots,
        D=width, N=entries.block, num_warps=8 if entries.block == 128 else 4,
    )  # fmt: skip
    return k, v


@triton.jit(do_not_specialize=["slots"])
def _vectors(k_code, v_code, scale, centre, k, v, slots, D: tl.constexpr, N: tl.constexpr):
    """Decode a block that `_entries` coded; its values return to their own order."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i, offs_d = tl.arange(0, N), tl.arange(0, D)
    start = row * slots + block * N
    mixed = i // 16 * 16 + i // 2 % 2 * 8 + i // 4 % 4 * 2 + i % 2
    scale += (row * (slots // N) + block) * 2
    keys = tl.load(k_code + (start + i)[:, None] * D + offs_d[None, :]).to(tl.float32)
    keys = keys * tl.load(scale) + tl.load(centre + row * D + offs_d)[None, :]
    tl.store(k + (start + i)[:, None] * D + offs_d[None, :], keys.to(k.dtype.element_ty))
    values = tl.load(v_code + start * D + offs_d[:, None] * N + i[None, :]).to(tl.float32)
    values = tl.trans(values * tl.load(scale + 1))
    tl.store(v + (start + mixed)[:, None] * D + offs_d[None, :], values.to(v.dtype.element_ty))


@triton.jit(do_not_specialize=["heads", "n"])
def _queries(
    x, code, scale, x_b, x_h, x_n, heads, n, unit,
    MOST: tl.constexpr, LEAST: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    b, h = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    at, offs_d = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, D)[None, :]
    inside = at < n
    x += b * x_b + h * x_h + at.to(tl.int64)[:, None] * x_n + offs_d
    vector = tl.load(x, mask=inside[:, None], other=0.0).to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(vector), 1), LEAST)
    vector *= tl.div_rn(tl.full([N], MOST, tl.float32), most)[:, None]
    place = row.to(tl.int64) * n + at
    tl.store(code + place[:, None] * D + offs_d, vector.to(tl.float8e4nv), mask=inside[:, None])
    tl.store(scale + place, most * unit, mask=inside)


@triton.jit(do_not_specialize=["heads", "n", "slots"])
def _entries(
    k, v, log_count, centre, k_code, v_code, scale, k_b, k_h, k_n, v_b, v_h, v_n, w_b, w_h,
    heads, n, slots,
    WEIGHTED: tl.constexpr, CENTRED: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr,
    D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Code a block of keys, or of values, which are transposed.

    Programs that did both would hold twice the registers, and a multiprocessor one of them.
    """
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = row // heads, row % heads
    i, offs_d = tl.arange(0, N), tl.arange(0, D)
    start, of_values = block * N, tl.program_id(2) == 1
    # of 16 values in a row: two of the first eight, two of the last, and so on
    mixed = i // 16 * 16 + i // 2 % 2 * 8 + i // 4 % 4 * 2 + i % 2
    at = start + tl.where(of_values, mixed, i)
    there = at < n
    if WEIGHTED:
        weight = tl.load(log_count + b * w_b + h * w_h + at, mask=there, other=0.0)
        there &= weight > float("-inf")
    scale += (row * (slots // N) + block) * 2
    if of_values:
        x = v + b * v_b + h * v_h + at.to(tl.int64)[:, None] * v_n + offs_d[None, :]
        values = tl.load(x, mask=there[:, None], other=0.0).to(tl.float32)
        most = tl.maximum(tl.max(tl.abs(values)), LEAST)
        values *= tl.div_rn(MOST + tl.zeros_like(most), most)
        turned = v_code + (row * slots + start) * D + offs_d[:, None] * N + i[None, :]
        tl.store(turned, tl.trans(values.to(tl.float8e4nv)))
        tl.store(scale + 1, most * (1 / MOST))
    else:
        x = k + b * k_b + h * k_h + at.to(tl.int64)[:, None] * k_n + offs_d[None, :]
        keys = tl.load(x, mask=there[:, None], other=0.0).to(tl.float32)
        if CENTRED:
            mean = tl.load(centre + row * D + offs_d)
            keys = tl.where(there[:, None], keys - mean[None, :], 0.0)
        most = tl.maximum(tl.max(tl.abs(keys)), LEAST)
        keys *= tl.div_rn(MOST + tl.zeros_like(most), most)
        code = k_code + (row * slots + at)[:, None] * D + offs_d[None, :]
        tl.store(code, keys.to(tl.float8e4nv))
        tl.store(scale, most * (1 / MOST))
