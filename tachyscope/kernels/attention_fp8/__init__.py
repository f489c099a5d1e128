"""Attention of float8 codes: made of queries and entries when they are read, or held as such."""

from tachyscope.kernels.attention_fp8 import torch as stock
from tachyscope.kernels.attention_fp8.torch import FP8, Entries, Listed, centre_of, dequantise
from tachyscope.kernels.dispatch import dispatch

__all__ = [
    "FP8",
    "Entries",
    "Listed",
    "attention_fp8",
    "block_sparse_attention_fp8",
    "centre_of",
    "dequantise",
    "listed_attention_fp8",
    "quantise_entries",
    "quantise_queries",
]

attention_fp8 = dispatch(stock.attention_fp8)
block_sparse_attention_fp8 = dispatch(stock.block_sparse_attention_fp8)
listed_attention_fp8 = dispatch(stock.listed_attention_fp8)
quantise_entries = dispatch(stock.quantise_entries)
quantise_queries = dispatch(stock.quantise_queries)
