"""The definition of a decision by inputs, in float64, row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from tachyscope.kernels.gemv.reference import norm_reference
from tachyscope.kernels.gemv.weights import Norm
from tachyscope.kernels.input_gate.gate import InputGate


def input_gate_reference(x: Tensor, norm: Norm, gate: InputGate) -> None:
    """All of the gate's tensors in place."""
    place, (rows, places, _) = int(gate.place), gate.input.shape
    a = norm_reference(x, norm).to(gate.input.dtype)
    old = gate.input[:, place].double()
    change = (a.double() - old).norm(dim=1) / old.norm(dim=1).clamp_min(1e-12)
    if gate.paired:
        change = change.view(2, -1).mean(0).repeat(2)
    for row in range(rows):
        replay = False
        if int(gate.ready):
            replay = _decides(float(change[row]), row, gate, place, places)
        gate.skip[row] = int(replay)
        if not replay:
            gate.input[row, place] = a[row]
    skipped = int(gate.skip.sum())
    gate.counts[0 if skipped == rows else 1] += skipped


def _decides(change: float, row: int, gate: InputGate, place: int, places: int) -> bool:
    if gate.kind == "threshold":
        return change <= gate.limit
    if gate.kind == "share":
        assert gate.recent is not None and gate.due is not None
        ring = gate.recent[row]
        known, higher = int((ring == ring).sum()), int((ring > torch.tensor(-change)).sum())
        ring[place] = -change
        replay = higher + 0.5 < float(gate.due[row]) * (known + 1)
        gate.due[row] += (float(not replay) - (1 - gate.limit)) / places
        return replay
    assert gate.credit is not None
    price, budget = change**2, gate.limit
    credit = min(float(gate.credit[row]) + budget, budget * places)
    replay = price <= credit and price <= gate.dearest * budget
    gate.credit[row] = credit - price * replay
    return replay
