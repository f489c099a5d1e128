"""Attention over listed blocks of the past, and all present entries (block-sparse)."""

from tachyscope.kernels.block_sparse import torch as stock
from tachyscope.kernels.block_table import BlockTable, Read, pairs_of
from tachyscope.kernels.dispatch import dispatch

__all__ = ["BlockTable", "Read", "block_sparse_attention", "pairs_of"]

block_sparse_attention = dispatch(stock.block_sparse_attention)
