"""Linears of float8 codes, with a scale for each token of x and each output channel of a weight."""

from tachyscope.kernels.linear_fp8.torch import Fp8Weight, fp8_weight, linear_fp8

__all__ = ["Fp8Weight", "fp8_weight", "linear_fp8"]
