"""Draw one of a token's codes from logits, and add its entry to the token's sum."""

from tachyscope.kernels.dispatch import dispatch
from tachyscope.kernels.sample_code import torch as stock
from tachyscope.kernels.sample_code.draw import Codes, Draw

__all__ = ["Codes", "Draw", "sample_code"]

sample_code = dispatch(stock.sample_code)
