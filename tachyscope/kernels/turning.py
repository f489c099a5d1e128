"""Turn heads by their positions in one reading and one writing (Triton)."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TOKENS = 32  # of a program


def turn(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """`turn_into`; the last dimension of every tensor is contiguous, cos and sin lie alike."""
    rows, heads, tokens, width = x.shape
    if x.is_meta or not tokens:
        return out
    by_row = cos.stride(0) if cos.dim() == 4 and cos.shape[0] > 1 else 0
    _turn[triton.cdiv(tokens, TOKENS), rows * heads](
        out, x, cos, sin, *out.stride()[:3], *x.stride()[:3], by_row, cos.stride(-2),
        heads, tokens, D=width, INTERLEAVED=interleaved, TOKENS=TOKENS, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["heads", "tokens"])
def _turn(
    out, x, cos, sin, out_row, out_head, out_token, x_row, x_head, x_token,
    angle_row, angle_token, heads, tokens,
    D: tl.constexpr, INTERLEAVED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    channel = tl.arange(0, D)
    partner = channel ^ 1 if INTERLEAVED else (channel + D // 2) % D
    here = (token < tokens)[:, None]
    at = x + row * x_row + head * x_head + token[:, None].to(tl.int64) * x_token
    angle = row * angle_row + token[:, None].to(tl.int64) * angle_token + channel[None, :]
    own = tl.load(at + channel[None, :], mask=here, other=0.0).to(tl.float32)
    other = tl.load(at + partner[None, :], mask=here, other=0.0).to(tl.float32)
    c = tl.load(cos + angle, mask=here, other=0.0)
    s = tl.load(sin + angle, mask=here, other=0.0)
    turned = own * c + other * s
    to = out + row * out_row + head * out_head + token[:, None].to(tl.int64) * out_token
    tl.store(to + channel[None, :], turned.to(out.dtype.element_ty), mask=here)
