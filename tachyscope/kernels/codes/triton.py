"""Codes in one reading and one writing (Triton)."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tachyscope.kernels.codes.torch import LARGEST, numbers
from tachyscope.kernels.launch import launch


def encode(x: Tensor, code: Tensor, scale: Tensor) -> None:
    """`encode`: x may be any part of a chunk, code and scale any part of a cache."""
    rows, heads, n, width = x.shape
    if n == 0:
        return
    launch(
        _encode, (triton.cdiv(n, 32), rows * heads),
        x, numbers(code), scale, *x.stride()[:3], *code.stride()[:3], *scale.stride()[:2],
        heads, n, LARGEST=LARGEST[code.dtype], WHOLE=code.dtype == torch.int8,
        D=width, N=32, num_warps=4,
    )  # fmt: skip


def decode_into(code: Tensor, scale: Tensor, out: Tensor) -> None:
    """`decode_into`, with nothing wide in between."""
    rows, heads, n, width = code.shape
    if n:
        launch(
            _decode, (triton.cdiv(n, 64), rows * heads),
            numbers(code), scale, out, *code.stride()[:3], *scale.stride()[:2], *out.stride()[:3],
            heads, n, D=width, N=64, num_warps=4,
        )  # fmt: skip


def decode_packed(
    code: Tensor, scale: Tensor, out: Tensor, bits: int, group: int = 1, first: int = 0
) -> None:
    """`decode_packed`, with nothing wide in between."""
    rows, heads, n, width = out.shape
    steps = scale.shape[3] // 2  # zeros stand behind them
    if n:
        launch(
            _decode_packed, (triton.cdiv(n, 64), rows * heads),
            code, scale, out, *code.stride()[:3], *scale.stride()[:3], *out.stride()[:3], heads, n,
            first, BITS=bits, GROUP=group, STEPS=steps, D=width, N=64, num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["heads", "n", "first"])
def _decode_packed(
    code, scale, out, c_b, c_h, c_n, s_b, s_h, s_n, o_b, o_h, o_n, heads, n, first,
    BITS: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A byte's channels lie as far apart as there are bytes, the first in its lowest bits."""
    W: tl.constexpr = D * BITS // 8
    SIZE: tl.constexpr = D // STEPS
    row = tl.program_id(1)
    b, h = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    at, offs_w = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, W)[None, :]
    inside = (at < n)[:, None]
    place = at.to(tl.int64)[:, None]
    byte = tl.load(code + b * c_b + h * c_h + place * c_n + offs_w, mask=inside, other=0)
    byte = byte.to(tl.int32)
    scale += b * s_b + h * s_h + (place + first) // GROUP * s_n
    out += b * o_b + h * o_h + place * o_n
    for part in tl.static_range(8 // BITS):
        offs_d = offs_w + part * W
        number = (byte >> (part * BITS)) & (2**BITS - 1)
        step = tl.load(scale + offs_d // SIZE, mask=inside, other=0.0).to(tl.float32)
        zero = tl.load(scale + offs_d // SIZE + STEPS, mask=inside, other=0.0)
        value = number.to(tl.float32) * step + zero.to(tl.float32)
        tl.store(out + offs_d, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["heads", "n"])
def _decode(
    code, scale, out, c_b, c_h, c_n, s_b, s_h, o_b, o_h, o_n, heads, n,
    D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    b, h = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    at, offs_d = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, D)[None, :]
    inside = at < n
    place = at.to(tl.int64)[:, None]
    vector = tl.load(
        code + b * c_b + h * c_h + place * c_n + offs_d, mask=inside[:, None], other=0.0
    )
    step = tl.load(scale + b * s_b + h * s_h + at, mask=inside, other=0.0)
    vector = (vector.to(tl.float32) * step[:, None]).to(out.dtype.element_ty)
    tl.store(out + b * o_b + h * o_h + place * o_n + offs_d, vector, mask=inside[:, None])


@triton.jit(do_not_specialize=["heads", "n"])
def _encode(
    x, code, scale, x_b, x_h, x_n, c_b, c_h, c_n, s_b, s_h, heads, n,
    LARGEST: tl.constexpr, WHOLE: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    b, h = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    at, offs_d = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, D)[None, :]
    inside = at < n
    place = at.to(tl.int64)[:, None]
    vector = tl.load(x + b * x_b + h * x_h + place * x_n + offs_d, mask=inside[:, None], other=0.0)
    vector = vector.to(tl.float32)
    step = tl.maximum(tl.max(tl.abs(vector), 1), 1e-12) / LARGEST
    number = tl.minimum(tl.maximum(vector / step[:, None], -LARGEST), LARGEST)
    number = (tl.floor(number + 0.5) if WHOLE else number).to(code.dtype.element_ty)
    tl.store(code + b * c_b + h * c_h + place * c_n + offs_d, number, mask=inside[:, None])
    tl.store(scale + b * s_b + h * s_h + at, step, mask=inside)
