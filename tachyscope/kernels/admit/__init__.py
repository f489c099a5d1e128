"""Choose a bank's resident blocks (LRU with hysteresis), and which of them each tile reads."""

from tachyscope.kernels.admit import torch as stock
from tachyscope.kernels.admit.torch import Residency, record_demand
from tachyscope.kernels.dispatch import dispatch

__all__ = ["Residency", "admit", "best_slots", "record_demand"]

admit = dispatch(stock.admit)
best_slots = dispatch(stock.best_slots)
