"""The definition of a linear of float8 codes, in float64."""

from __future__ import annotations

from torch import Tensor

from tachyscope.kernels.linear_fp8 import Fp8Weight


def linear_fp8_reference(
    code: Tensor, scale: Tensor, weight: Fp8Weight, bias: Tensor | None
) -> Tensor:
    x = code.double() * scale.double()
    out = x @ (weight.code.double() * weight.scale.double()).mT
    return out if bias is None else out + bias.double()
