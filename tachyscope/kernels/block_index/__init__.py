"""Index past entries by blocks: buckets that order them, codes of blocks, a tile's mass on each."""

from tachyscope.kernels.block_index import torch as stock
from tachyscope.kernels.block_index.torch import LOWEST, Codes, entry_mass
from tachyscope.kernels.dispatch import dispatch

__all__ = ["LOWEST", "Codes", "block_mass", "buckets", "encode_blocks", "entry_mass", "mean_mass"]

block_mass = dispatch(stock.block_mass)
buckets = dispatch(stock.buckets)
encode_blocks = dispatch(stock.encode_blocks)
mean_mass = dispatch(stock.mean_mass)
