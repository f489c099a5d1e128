"""Temporal attention score, an MLP that runs on some rows only, what all rows' outputs share."""

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


def relative_change(x: Tensor, old: Tensor) -> Tensor:
    """|x - old| / |old| of inputs [B, S, W]: [B, S], in float32."""
    fine = torch.promote_types(x.dtype, torch.float32)
    far, size = (torch.linalg.vector_norm(z, dim=-1, dtype=fine) for z in (x - old, old))
    return (far / size.clamp_min(1e-12)).float()


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


def grow_older(age: Tensor, computed: Tensor | bool) -> None:
    """Ages [B, S], in place, after a pass that computed those rows: a mask [B, S], all or none."""
    if computed is True:
        age.zero_()
    elif computed is False:
        age.add_(1)
    else:
        age.add_(1).masked_fill_(computed, 0)


def follow_drift(
    drift: Tensor, y: Tensor, old: Tensor, computed: Tensor | bool, memory: float
) -> tuple[Tensor, Tensor]:
    """Outputs and drift, once y [B, S, W] was computed at `computed` and is old elsewhere.

    drift [B, 1, W] is a running mean, over `memory` rows, of how computed outputs differ from
    those they replace. It is what a whole frame's outputs have in common, and a row that is
    replayed needs it too. `computed` is a mask [B, S], or the host's word for all rows.
    """
    if computed is False:
        return old + drift, drift
    if computed is True and y.shape[1] == 1:
        return y, torch.lerp(drift, y - old, 1 / memory)
    if computed is True:
        computed = torch.ones(y.shape[:2], dtype=torch.bool, device=y.device)
    count = computed.sum(1, keepdim=True).unsqueeze(-1)
    change = (y - old).sum(1, keepdim=True) / count.clamp(min=1)
    drift = torch.lerp(drift, change, 1 - (1 - 1 / memory) ** count.to(drift.dtype))
    return torch.where(computed.unsqueeze(-1), y, old + drift), drift


def remembered_error(error: Tensor, base: Tensor, x: Tensor, beta: float) -> Tensor:
    """An error [B, S, W] kept with its input `base`, as far as it still holds at x, both [B, S, W].

    It fades with the distance of the inputs: exp(-beta |x - base|² / |base|²).
    """
    far = (x - base).square().sum(-1, keepdim=True)
    return error * torch.exp(-beta * far / base.square().sum(-1, keepdim=True).clamp_min(1e-12))
