"""Settle which blocks of a bank are resident, and which of those that are each tile reads."""

from tachyscope.kernels.admit import torch as stock
from tachyscope.kernels.admit.torch import Residency, note
from tachyscope.kernels.dispatch import dispatch

__all__ = ["Residency", "admit", "best_places", "note"]

admit = dispatch(stock.admit)
best_places = dispatch(stock.best_places)
