"""A layer's stages with float8 linears, by operations that the caller provides."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tachyscope.models.wan.stages import EAGER, Stages, normed, rms, split

Codes = tuple[Tensor, Tensor]  # codes [..., W] and a scale a row


class Fp8Operations(Hashable, Protocol):
    """The operations on float8 codes, as `tachyscope/kernels/fp8.py` has them."""

    def quantise(self, x: Tensor) -> Codes: ...
    def gelu_quantise(self, x: Tensor) -> Codes: ...
    def norm_quantise(self, x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Codes: ...
    def add_gated(self, x: Tensor, y: Tensor, gate: Tensor) -> Tensor: ...
    def add_norm(
        self, x: Tensor, y: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> Codes: ...
    def linear_fp8(
        self, code: Tensor, scale: Tensor, weight: Codes, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor: ...


class Fp8Linear(nn.Module):
    """A linear with a float8 weight; `weight` is its codes and their scales by row."""

    def __init__(self, weight: Tensor, bias: Tensor, operations: Fp8Operations) -> None:
        super().__init__()
        code, scale = operations.quantise(weight.detach())
        self.code = nn.Parameter(code, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def weight(self) -> Codes:
        return self.code, self.scale


@functools.cache
def fp8_stages(operations: Fp8Operations) -> Stages:
    """Stages with float8 linears, except those of cross-attention; activations are quantised."""
    quantise, linear = operations.quantise, operations.linear_fp8

    def to_attention(
        x: Tensor,
        time: Tensor,
        modulation: Tensor,
        linears: Sequence[tuple[Codes, Tensor]],
        norms: tuple[Tensor, Tensor],
        eps: float,
        heads: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        shift, scale = (modulation + time)[:, :, 0:2].unbind(2)
        (weight, bias), dtype = linears[0], x.dtype
        codes = operations.norm_quantise(x, shift, scale, eps)
        q, k, v = linear(*codes, weight, bias, dtype).chunk(3, -1)
        q, k = (rms(part, norm, eps) for part, norm in zip((q, k), norms, strict=True))
        return split(q, heads), split(k, heads), split(v, heads)

    def to_text(
        x: Tensor,
        y: Tensor,
        time: Tensor,
        modulation: Tensor,
        out: Codes,
        out_bias: Tensor,
        norm: Tensor,
        norm_bias: Tensor,
        query: Tensor,
        query_bias: Tensor,
        query_norm: Tensor,
        eps: float,
        heads: int,
        injected: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        y = linear(*quantise(y), out, out_bias, x.dtype)
        gate = (modulation + time)[:, :, 2]
        if injected is None:
            x, a = operations.add_norm(x, y, gate, norm, norm_bias, eps)
        else:
            x = torch.addcmul(injected[1], injected[0], operations.add_gated(x, y, gate))
            a = normed(x, norm, norm_bias, eps, time.dtype)
        return x, split(rms(F.linear(a, query, query_bias), query_norm, eps), heads)

    def from_mlp(x: Tensor, y: Tensor, time: Tensor, modulation: Tensor) -> Tensor:
        return operations.add_gated(x, y, (modulation + time)[:, :, 5])

    def feed_forward(
        x: Tensor, up: Codes, up_bias: Tensor, down: Codes, down_bias: Tensor
    ) -> Tensor:
        inner = linear(*quantise(x), up, up_bias, x.dtype)
        return linear(*operations.gelu_quantise(inner), down, down_bias, x.dtype)

    return Stages(to_attention, to_text, EAGER.to_mlp, from_mlp, feed_forward)
