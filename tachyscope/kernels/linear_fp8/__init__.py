"""Linears of float8 codes, each row of which has a scale: x by token, weights by output channel."""

from tachyscope.kernels.linear_fp8.torch import Fp8Weight, fp8_weight, linear_fp8

__all__ = ["Fp8Weight", "fp8_weight", "linear_fp8"]
