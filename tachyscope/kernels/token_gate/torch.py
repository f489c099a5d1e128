"""A decision about tokens by stock torch; the host reads no number of the device's."""

from __future__ import annotations

import torch
from torch import Tensor

from tachyscope.kernels.gemv.torch import normed
from tachyscope.kernels.gemv.weights import Norm
from tachyscope.kernels.replay import relative_change
from tachyscope.kernels.token_gate.gate import MAX_TOKEN_COST, GateState


def decide(state: GateState, score: Tensor) -> None:
    """Whether each row's token replays, by scores [B, 1], to `state.skip`."""
    gate, limit, ready = state.gate, state.limit, state.ready.bool()
    place, places, score = state.place.long().view(1), state.age.shape[1], score.float()
    if gate.tied:
        score = score.view(2, -1).mean(0, keepdim=True).expand(2, -1).reshape(-1, 1)
    left = price = limit
    if gate.rule == "threshold":
        replay = score > limit if gate.strict else score >= limit
    elif gate.rule == "draw":
        replay = score < limit
    elif gate.rule == "share":
        assert state.recent is not None and state.due is not None
        ring = state.recent
        known = (ring == ring).sum(-1, keepdim=True)  # not a number is not itself
        higher = (ring > score).sum(-1, keepdim=True)
        ring.index_copy_(1, place, torch.where(ready, score, ring.index_select(1, place)))
        replay = higher + 0.5 < state.due * (known + 1)
    else:
        assert state.credit is not None
        price = score.square()
        left = torch.minimum(state.credit + limit, limit * places)
        replay = (price <= left) & (price <= MAX_TOKEN_COST * limit)
    replay = replay & ready
    if gate.age_limit:
        replay = replay & (state.age.index_select(1, place) < gate.age_limit)
    if state.due is not None:
        computed, replayed = gate.owed(places)
        owed = torch.where(replay, replayed, computed).to(state.due.dtype)
        state.due.add_(torch.where(ready, owed, 0.0))
    if state.credit is not None:
        left = torch.where(replay, left - price, left)
        state.credit.copy_(torch.where(ready, left, state.credit))
    state.skip.copy_(replay[:, 0])
    skipped, all_of_them = replay.sum(), replay.all()
    state.counts[0] += torch.where(all_of_them, skipped, 0)
    state.counts[1] += torch.where(all_of_them, 0, skipped)


def decide_by_input(x: Tensor, norm: Norm, state: GateState) -> None:
    """`decide` by the MLP's input norm(x), x [B, W]; the inputs of computed tokens are kept."""
    assert state.input is not None
    place = state.place.long().view(1)
    a, old = normed(x, norm)[:, None], state.input.index_select(1, place)
    decide(state, -relative_change(a, old))
    replay = state.skip.bool()[:, None, None]
    state.input.index_copy_(1, place, torch.where(replay, old, a))
