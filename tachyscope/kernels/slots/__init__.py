"""Move entries between a cache's slots."""

from tachyscope.kernels.dispatch import dispatch
from tachyscope.kernels.slots import torch as stock

permute = dispatch(stock.permute)
shift = dispatch(stock.shift)
