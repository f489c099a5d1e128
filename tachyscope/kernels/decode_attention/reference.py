"""The definition of one token's attention and of its gate, in float64, entry by entry."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from tachyscope.kernels.decode_attention.step import Step, Window
from tachyscope.kernels.token_gate.gate import GateState
from tachyscope.kernels.token_gate.reference import decide_reference


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
        query = q.double() if step.gate.gate.score == "mixed" else q_turned
        decide_reference(step.gate, _score_reference(query, k_turned, step.gate))
    return out.flatten(1)


def _score_reference(q: Tensor, k: Tensor, state: GateState) -> Tensor:
    """q [B, H, D] against the kept keys, or numbers drawn: [B, 1]; keeps k."""
    (b, heads, d), place = q.shape, int(state.place)
    if state.key is None:
        assert state.luck is not None
        return state.luck[place][:, None]
    score = torch.zeros(b, dtype=torch.float64)
    group = heads // state.key.shape[1]
    for row in range(b):
        for head in range(heads):
            score[row] += q[row, head] @ state.key[row, head // group, place].double()
    state.key[:, :, place] = k.to(state.key.dtype)
    return (score / (heads * math.sqrt(d)))[:, None]


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
    first = 0 if window is None else int(window.padding[row])
    if window is None or slot + 1 <= first + window.sink + window.near:
        return list(range(slot + 1))
    sink, near = range(first, first + window.sink), range(slot + 1 - window.near, slot + 1)
    return [*sink, *near]
