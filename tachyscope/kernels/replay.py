"""Temporal attention score, and an MLP that runs on some rows only."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def temporal_score(q: Tensor, k: Tensor) -> Tensor:
    """Mean over query heads of q·k / √D, by token: q [B, H, S, D], k [B, Hkv, S, D] -> [B, S].

    Both rotated, it is the attention logit between a token and its own place one frame back.
    """
    group = q.shape[1] // k.shape[1]
    if group > 1:
        # the sum over a group's query heads meets the group's one key
        q = q.unflatten(1, (k.shape[1], group)).sum(2)
    return (q * k).sum((1, 3)) / (k.shape[1] * group * math.sqrt(q.shape[-1]))


def temporal_score_reference(q: Tensor, k: Tensor) -> Tensor:
    """The definition, head by head in float64."""
    group = q.shape[1] // k.shape[1]
    heads = [
        (q[:, h].double() * k[:, h // group].double()).sum(-1) / math.sqrt(q.shape[-1])
        for h in range(q.shape[1])
    ]
    return torch.stack(heads).mean(0).to(q.dtype)


def replay_rows(x: Tensor, old: Tensor, rows: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """fn(x) at tokens rows [B, R], old elsewhere: fn sees those rows only."""
    wide = rows.unsqueeze(-1).expand(-1, -1, x.shape[-1])
    return old.scatter(1, wide, fn(x.gather(1, wide)).to(old.dtype))


def replay_gated(x: Tensor, old: Tensor, gate: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """fn(x) where gate [B, S], old elsewhere: fn sees the gated rows only.

    How many they are makes a shape from data, so the host must look: for the CPU.
    """
    out = old.clone()
    if bool(gate.any()):
        out[gate] = fn(x[gate]).to(old.dtype)
    return out


def replay_masked(x: Tensor, old: Tensor, gate: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """The definition of both, and all that stock CUDA can do without a wait: it saves nothing."""
    return torch.where(gate.unsqueeze(-1), fn(x).to(old.dtype), old)
