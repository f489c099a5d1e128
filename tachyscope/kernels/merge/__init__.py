"""Merge alike entries: fold them into one another and close the gaps, in place."""

from tachyscope.kernels.dispatch import dispatch
from tachyscope.kernels.merge import torch as stock
from tachyscope.kernels.merge.torch import Entries, join_entries

__all__ = ["Entries", "join_entries", "merge_entries"]

merge_entries = dispatch(stock.merge_entries)
