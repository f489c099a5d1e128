"""Copy blocks of entries between a cache and host memory, as they are or as codes."""

from tachyscope.kernels.dispatch import dispatch
from tachyscope.kernels.host_blocks import torch as stock
from tachyscope.kernels.host_blocks.torch import HostBlocks, block_index

__all__ = ["HostBlocks", "block_index", "load_blocks", "store_blocks"]

load_blocks = dispatch(stock.load_blocks)
store_blocks = dispatch(stock.store_blocks)
