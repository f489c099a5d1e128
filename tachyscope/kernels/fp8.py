"""The operations of a model's float8 linears, and of what stands between them."""

from tachyscope.kernels.linear_fp8 import linear_fp8
from tachyscope.kernels.norm_quantise.operators import (
    add_gated,
    add_norm,
    gelu_quantise,
    norm_quantise,
    quantise,
)

__all__ = ["add_gated", "add_norm", "gelu_quantise", "linear_fp8", "norm_quantise", "quantise"]
