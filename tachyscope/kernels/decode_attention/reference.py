"""The definition of one token's attention and of its gate, in float64, entry by entry."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from tachyscope.kernels.decode_attention.step import Gate, Step, Window


def decode_attention_reference(qkv: Tensor, step: Step, tokens: int = 1) -> Tensor:
    """Attention [B, H * D] of qkv [B, (H + 2 Hkv) * D]; caches and the gate's tensors in place.

    Of several tokens a row, one after the other.
    """
    if tokens > 1:
        each = []
        for i in range(tokens):
            held = replace(step.entries, slot=step.entries.slot + i)
            one = replace(step, entries=held, place=step.place + i)
            each.append(decode_attention_reference(qkv[i::tokens], one))
        return torch.stack(each, 1).flatten(0, 1)
    held, (b, hkv, _, d) = step.entries, step.entries.k.shape
    slot, place, group = int(held.slot), int(step.place), step.heads // hkv
    q, k, v = qkv.unflatten(-1, (-1, d)).split([step.heads, hkv, hkv], 1)
    q_turned, k_turned = _turned(q, step, place), _turned(k, step, place)
    out = torch.zeros(b, step.heads, d, dtype=torch.float64)
    held.k[:, :, slot], held.v[:, :, slot] = k_turned.to(held.k.dtype), v.to(held.v.dtype)
    if held.unrotated is not None:
        held.unrotated[:, :, slot] = k
    for row in range(b):
        seen = _seen(step.window, row, slot)
        for head in range(step.heads):
            own = head // group
            scores = held.k[row, own, seen].double() @ q_turned[row, head] / math.sqrt(d)
            if held.log_count is not None:
                weights = held.log_count[row, own if held.log_count.shape[1] > 1 else 0, seen]
                scores = scores + weights.double().where(torch.tensor(seen) < slot, 0.0)
            out[row, head] = scores.softmax(0) @ held.v[row, own, seen].double()
    if step.gate is not None:
        query = q.double() if step.gate.mixed else q_turned
        decide_reference(query, k_turned, step.gate, place)
    return out.flatten(1)


def decide_reference(q: Tensor, k: Tensor, gate: Gate, place: int) -> None:
    """q [B, H, D] against the kept keys, then the rule of the gate's kind, row by row."""
    b, heads, d = q.shape
    score = torch.zeros(b, dtype=torch.float64)
    if gate.key is not None:
        group = heads // gate.key.shape[1]
        for row in range(b):
            for head in range(heads):
                score[row] += q[row, head] @ gate.key[row, head // group, place].double()
        score /= heads * math.sqrt(d)
        gate.key[:, :, place] = k.to(gate.key.dtype)
    if not int(gate.ready):
        gate.skip.zero_()
        return
    if gate.tied:
        score = score.view(2, -1).mean(0).repeat(2)
    for row in range(b):
        value, age = float(gate.value), int(gate.age[row, place])
        if gate.kind == "threshold":
            own = float(score[row])
            replay = own > value if gate.strict else own >= value
        elif gate.recent is not None and gate.due is not None:
            ring = gate.recent[row]
            known, higher = int((ring == ring).sum()), int((ring.double() > score[row]).sum())
            ring[place] = score[row]
            replay = higher + 0.5 < float(gate.due[row]) * (known + 1)
        else:
            assert gate.luck is not None
            replay = float(gate.luck[place, row]) < value
        replay = replay and not (gate.age_limit and age >= gate.age_limit)
        if gate.recent is not None and gate.due is not None:
            gate.due[row] += (float(not replay) - (1 - value)) / gate.recent.shape[1]
        gate.skip[row] = int(replay)
    skipped = int(gate.skip.sum())
    gate.counts[0 if skipped == b else 1] += skipped


def _turned(x: Tensor, step: Step, place: int) -> Tensor:
    """x [B, heads, D] rotated, as rounded when it is kept."""
    if step.rotation is None:
        return x.double()
    r, half = step.rotation, x.shape[-1] // 2
    out = x.double().clone()
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if r.interleaved else (i, i + half)
        c, s = (t[:, place, b].double()[:, None] for t in (r.cos, r.sin))
        out[..., a] = x[..., a] * c - x[..., b] * s
        out[..., b] = x[..., b] * c + x[..., a] * s
    return out.to(x.dtype).double()


def _seen(window: Window | None, row: int, slot: int) -> list[int]:
    if window is None or slot + 1 <= window.whole:
        return list(range(slot + 1))
    first = int(window.padding[row])
    sink, near = range(first, first + window.sink), range(slot + 1 - window.near, slot + 1)
    return [*sink, *near]
