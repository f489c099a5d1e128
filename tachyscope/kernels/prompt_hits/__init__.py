"""Count the queries that are nearest to each prompt token."""

from tachyscope.kernels.dispatch import dispatch
from tachyscope.kernels.prompt_hits import torch as stock

count_nearest = dispatch(stock.count_nearest)
