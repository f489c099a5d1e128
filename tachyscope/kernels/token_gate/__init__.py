"""Decide which tokens replay the MLP output that was kept of the last frame."""

from tachyscope.kernels.dispatch import dispatch
from tachyscope.kernels.token_gate import torch as stock
from tachyscope.kernels.token_gate.gate import (
    MAX_TOKEN_COST,
    GateState,
    Score,
    TokenGate,
    gate_tensors,
)

__all__ = [
    "MAX_TOKEN_COST",
    "GateState",
    "Score",
    "TokenGate",
    "decide",
    "decide_by_input",
    "gate_tensors",
]

decide = dispatch(stock.decide)
decide_by_input = dispatch(stock.decide_by_input)
