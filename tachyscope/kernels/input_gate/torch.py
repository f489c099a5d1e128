"""A decision by inputs by stock torch; the host reads no number of the device's."""

from __future__ import annotations

import torch
from torch import Tensor

from tachyscope.kernels.gemv.torch import normed
from tachyscope.kernels.gemv.weights import Norm
from tachyscope.kernels.input_gate.gate import InputGate
from tachyscope.kernels.replay import relative_change


def input_gate(x: Tensor, norm: Norm, gate: InputGate) -> None:
    place, places = gate.place.long().view(1), gate.input.shape[1]
    a, old = normed(x, norm)[:, None], gate.input.index_select(1, place)
    change, ready = relative_change(a, old), gate.ready.bool()  # [B, 1]
    if gate.paired:
        pairs = change.unflatten(0, (2, -1))
        change = pairs.mean(0, keepdim=True).expand_as(pairs).flatten(0, 1)
    if gate.kind == "threshold":
        replay = ready & (change <= gate.limit)
    elif gate.kind == "share":
        assert gate.recent is not None and gate.due is not None
        ring, due, score = gate.recent, gate.due, -change
        known = (ring == ring).sum(-1, keepdim=True, dtype=due.dtype)
        higher = (ring > score).sum(-1, keepdim=True, dtype=due.dtype)
        replay = ready & (higher + 0.5 < due * (known + 1))
        ring.index_copy_(1, place, torch.where(ready, score, ring.index_select(1, place)))
        owed = due - (1 - gate.limit) / places + (~replay).to(due.dtype) / places
        due.copy_(torch.where(ready, owed, due))
    else:
        assert gate.credit is not None
        price, budget = change.square(), gate.limit
        credit = (gate.credit + budget).clamp(max=budget * places)
        replay = ready & (price <= credit) & (price <= gate.dearest * budget)
        credit = credit - price * replay
        gate.credit.copy_(torch.where(ready, credit, gate.credit))
    gate.skip.copy_(replay[:, 0])
    gate.input.index_copy_(1, place, torch.where(replay[..., None], old, a))
    skipped, all_of_them = replay.sum(), replay.all()
    gate.counts[0] += torch.where(all_of_them, skipped, 0)
    gate.counts[1] += torch.where(all_of_them, 0, skipped)
