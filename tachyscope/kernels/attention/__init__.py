"""Attention over entries that may stand for several, or for none."""

from tachyscope.kernels.attention import torch as stock
from tachyscope.kernels.dispatch import dispatch

attention = dispatch(stock.attention)
