"""Linears of float8 codes: torch._scaled_mm on a GPU, float32 on a CPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tachyscope.kernels.norm_quantise.torch import quantise


class Fp8Weight(NamedTuple):
    """A linear's weight as codes [out, in], and its scales [out, 1] in float32."""

    code: Tensor
    scale: Tensor


def fp8_weight(weight: Tensor) -> Fp8Weight:
    return Fp8Weight(*quantise(weight))


def linear_fp8(
    code: Tensor,
    scale: Tensor,
    weight: tuple[Tensor, Tensor],
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """x W^T + bias for x [..., in] as codes and scales [..., 1]."""
    held = Fp8Weight(*weight)
    if code.is_meta:
        return code.new_empty((*code.shape[:-1], held.code.shape[0]), dtype=dtype)
    if code.is_cuda:
        out = torch._scaled_mm(
            code.flatten(0, -2), held.code.mT, scale.flatten(0, -2), held.scale.mT,
            bias=bias, out_dtype=dtype, use_fast_accum=True,
        )  # fmt: skip
        return out.unflatten(0, code.shape[:-1])
    # products and sums of a CPU are in float32
    out = (code.float() @ held.code.float().mT) * scale * held.scale.mT
    return (out if bias is None else out + bias.float()).to(dtype)
