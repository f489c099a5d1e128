"""The definition of a decision about tokens, row by row; it is exact, in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from tachyscope.kernels.gemv.reference import norm_reference
from tachyscope.kernels.gemv.weights import Norm
from tachyscope.kernels.token_gate.gate import MAX_TOKEN_COST, GateState


def decide_reference(state: GateState, score: Tensor) -> None:
    """All of the state's tensors in place, by scores [B, 1]."""
    score = score[:, 0].float()
    if state.gate.tied:
        score = score.view(2, -1).mean(0).repeat(2)
    for row in range(len(score)):
        state.skip[row] = bool(state.ready) and _replays(state, row, score[row])
    skipped = int(state.skip.sum())
    state.counts[0 if skipped == len(score) else 1] += skipped


def _replays(state: GateState, row: int, score: Tensor) -> bool:
    gate, limit, place, places = state.gate, state.limit, int(state.place), state.age.shape[1]
    young = not gate.age_limit or int(state.age[row, place]) < gate.age_limit
    if gate.rule == "threshold":
        return young and bool(score > limit if gate.strict else score >= limit)
    if gate.rule == "draw":
        return young and bool(score < limit)
    if gate.rule == "share":
        assert state.recent is not None and state.due is not None
        ring = state.recent[row]
        known, higher = int((ring == ring).sum()), int((ring > score).sum())
        ring[place] = score
        replay = young and bool(higher + 0.5 < state.due[row] * (known + 1))
        state.due[row] += torch.tensor(gate.owed(places)[replay])
        return replay
    assert state.credit is not None
    price = score * score
    left = torch.minimum(state.credit[row] + limit, limit * places)
    replay = young and bool(price <= left) and bool(price <= MAX_TOKEN_COST * limit)
    state.credit[row] = left - price if replay else left
    return replay


def decide_by_input_reference(x: Tensor, norm: Norm, state: GateState) -> None:
    """All of the state's tensors in place, from the MLP's input norm(x), x [B, W]."""
    assert state.input is not None
    place = int(state.place)
    a = norm_reference(x, norm).to(state.input.dtype)
    old = state.input[:, place].double()
    change = (a.double() - old).norm(dim=1) / old.norm(dim=1).clamp_min(1e-12)
    decide_reference(state, -change[:, None])
    computed = state.skip == 0
    state.input[computed, place] = a[computed]
