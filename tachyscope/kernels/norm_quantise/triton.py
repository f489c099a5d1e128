"""Between linears, a row a program: one reading and one writing (Triton)."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tachyscope.kernels.launch import launch
from tachyscope.kernels.norm_quantise.torch import FP8, LARGEST, LEAST


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    return _rows(x)[1:]


def gelu_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    return _rows(x, gelu=True)[1:]


def norm_quantise(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _rows(x, shift=shift, scale=scale, eps=eps)[1:]


def add_norm(
    x: Tensor, y: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    shift, scale = (one.expand(x.shape[0], 1, -1) for one in (bias, weight))
    total, normed, _ = _rows(x, y, gate, shift, scale, eps=eps, codes=False, plus_one=False)
    return total, normed


def add_gated(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    return _rows(x, y, gate, codes=False)[0]


def _rows(
    x: Tensor,
    y: Tensor | None = None,
    gate: Tensor | None = None,
    shift: Tensor | None = None,
    scale: Tensor | None = None,
    eps: float = 0.0,
    gelu: bool = False,
    codes: bool = True,
    plus_one: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """x + y · gate [B, S, W]; its norm, its GELU or itself; the scales of that if it is codes.

    A result that nobody needs is x.
    """
    x = x.contiguous()
    adds, width, rows = y is not None, x.shape[-1], x.shape[:-1].numel()
    total = torch.empty_like(x) if adds else x
    y = x if y is None else y.contiguous()
    made, steps = x, x
    if codes:
        made = torch.empty(x.shape, dtype=torch.uint8, device=x.device).view(FP8)
        steps = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    elif shift is not None:
        made = torch.empty_like(x)
    batch_rows = x.shape[1] if x.dim() == 3 else rows
    frames: list[object] = []  # of each modulation: its strides, and the rows that share a frame's
    for one in (gate, shift, scale):
        if one is None:
            frames += [x, 0, 0, 1]
        else:
            assert one.stride(2) == 1
            frames += [one, one.stride(0), one.stride(1), batch_rows // one.shape[1]]
    block = triton.next_power_of_2(width)
    launch(
        _row, (rows,),
        x, y, total, made, steps, *frames, batch_rows, width, eps,
        ADD=adds, GATED=gate is not None, NORM=shift is not None, PLUS_ONE=plus_one,
        GELU=gelu, CODES=codes, MOST=LARGEST, LEAST=LEAST, N=block,
        num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return total, made, steps


@triton.jit(do_not_specialize=["g_rows", "h_rows", "c_rows", "batch_rows", "eps"])
def _row(
    x, y, total, made, steps, gate, g_b, g_f, g_rows, shift, h_b, h_f, h_rows, scale, c_b, c_f,
    c_rows, batch_rows, width, eps,
    ADD: tl.constexpr, GATED: tl.constexpr, NORM: tl.constexpr, PLUS_ONE: tl.constexpr,
    GELU: tl.constexpr, CODES: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    b, at = row // batch_rows, row % batch_rows
    i = tl.arange(0, N)
    inside = i < width
    place = row.to(tl.int64) * width + i
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        more = tl.load(y + place, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            own = gate + b * g_b + at // g_rows * g_f
            more *= tl.load(own + i, mask=inside, other=0.0).to(tl.float32)
        rounded = (value + more).to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=inside)
        value = rounded.to(tl.float32)
    if NORM:
        mean = tl.sum(value, 0) / width
        centred = tl.where(inside, value - mean, 0.0)
        normed = centred * tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
        own = scale + b * c_b + at // c_rows * c_f
        factor = tl.load(own + i, mask=inside, other=0.0).to(tl.float32)
        if PLUS_ONE:
            factor += 1
        own = shift + b * h_b + at // h_rows * h_f
        value = normed * factor + tl.load(own + i, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        # x (1 + tanh u) / 2 is x over 1 + exp(-2u)
        u = 0.7978845608028654 * (value + 0.044715 * value * value * value)
        value *= tl.sigmoid(2 * u)
    if CODES:
        most = tl.maximum(tl.max(tl.abs(value), 0), LEAST)
        code = value * tl.div_rn(MOST + tl.zeros_like(most), most)
        tl.store(made + place, code.to(tl.float8e4nv), mask=inside)
        tl.store(steps + row, most * (1 / MOST))
    elif NORM:
        tl.store(made + place, value.to(made.dtype.element_ty), mask=inside)
