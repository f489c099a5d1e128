"""Row operations between linears: residual, norm, modulation, GELU, float8 codes.

On a GPU each reads its inputs once and writes its results once.
"""

from tachyscope.kernels.dispatch import dispatch
from tachyscope.kernels.norm_quantise import torch as stock

__all__ = ["add_gated", "add_norm", "gelu_quantise", "norm_quantise", "quantise"]

quantise = dispatch(stock.quantise)
gelu_quantise = dispatch(stock.gelu_quantise)
norm_quantise = dispatch(stock.norm_quantise)
add_norm = dispatch(stock.add_norm)
add_gated = dispatch(stock.add_gated)
