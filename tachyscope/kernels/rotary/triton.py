"""Rotary embedding in one reading and one writing (Triton)."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tachyscope.core.types import Rope
from tachyscope.kernels.launch import launch

TOKENS, HEADS = 8, 4  # of a program: angles are read once for its heads


def apply_rotary(out: Tensor | None, x: Tensor, cos: Tensor, sin: Tensor, rope: Rope) -> Tensor:
    """`apply_rotary`; the last dimension of every tensor is contiguous, cos and sin lie alike."""
    out = torch.empty_like(x) if out is None else out
    rows, heads, tokens, width = x.shape
    if not tokens:
        return out
    by_row = cos.stride(0) if cos.dim() == 4 and cos.shape[0] > 1 else 0
    launch(
        _rotate, (triton.cdiv(tokens, TOKENS), rows, triton.cdiv(heads, HEADS)),
        out, x, cos, sin, *out.stride()[:3], *x.stride()[:3], by_row, cos.stride(-2),
        heads, tokens, D=width, INTERLEAVED=rope.interleaved, TOKENS=TOKENS, HEADS=HEADS,
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["heads", "tokens"])
def _rotate(
    out, x, cos, sin, out_row, out_head, out_token, x_row, x_head, x_token,
    angle_row, angle_token, heads, tokens,
    D: tl.constexpr, INTERLEAVED: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(1).to(tl.int64)
    here = (token < tokens)[:, None]
    token, channel = token.to(tl.int64)[:, None], tl.arange(0, D)[None, :]
    angle = row * angle_row + token * angle_token + channel
    cos_a, cos_b = _pairs(tl.load(cos + angle, mask=here, other=0.0), INTERLEAVED)
    sin_a, sin_b = _pairs(tl.load(sin + angle, mask=here, other=0.0), INTERLEAVED)
    x += row * x_row + token * x_token + channel
    out += row * out_row + token * out_token + channel
    for i in tl.static_range(HEADS):
        head = tl.program_id(2) * HEADS + i
        mine = token < tl.where(head < heads, tokens, 0)
        value = tl.load(x + head.to(tl.int64) * x_head, mask=mine, other=0.0).to(tl.float32)
        a, b = _pairs(value, INTERLEAVED)
        rotated = _channels(a * cos_a + b * sin_a, b * cos_b + a * sin_b, INTERLEAVED)
        tl.store(out + head.to(tl.int64) * out_head, rotated.to(out.dtype.element_ty), mask=mine)


@triton.jit
def _pairs(x, INTERLEAVED: tl.constexpr):
    """Of each pair of channels that rotate together the first, and the second."""
    if INTERLEAVED:
        return tl.split(x.reshape(x.shape[0], x.shape[1] // 2, 2))
    else:
        return tl.split(x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1))


@triton.jit
def _channels(a, b, INTERLEAVED: tl.constexpr):
    x = tl.join(a, b)
    if not INTERLEAVED:
        x = x.permute(0, 2, 1)
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2])
