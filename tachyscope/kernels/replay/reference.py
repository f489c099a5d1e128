"""The definitions of the temporal attention score, of drift and of a fading error, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def temporal_score_reference(q: Tensor, k: Tensor) -> Tensor:
    """The definition, head by head in float64."""
    group = q.shape[1] // k.shape[1]
    heads = [
        (q[:, h].double() * k[:, h // group].double()).sum(-1) / math.sqrt(q.shape[-1])
        for h in range(q.shape[1])
    ]
    return torch.stack(heads).mean(0).to(q.dtype)


def follow_drift_reference(
    drift: Tensor, y: Tensor, old: Tensor, computed: Tensor, memory: float
) -> tuple[Tensor, Tensor]:
    """The definition, row by row in float64."""
    out, drifts = y.double().clone(), drift.double().clone()
    for b, (rows, mean) in enumerate(zip(computed.tolist(), drifts, strict=True)):
        changes = [y[b, i].double() - old[b, i].double() for i, ran in enumerate(rows) if ran]
        for _ in changes:
            mean += (torch.stack(changes).mean(0) - mean) / memory
        for i, ran in enumerate(rows):
            if not ran:
                out[b, i] = old[b, i] + mean
    return out.to(y.dtype), drifts.to(drift.dtype)


def remembered_error_reference(error: Tensor, base: Tensor, x: Tensor, beta: float) -> Tensor:
    """The definition, token by token in float64."""
    out = torch.zeros(error.shape, dtype=torch.float64)
    for b in range(error.shape[0]):
        for i in range(error.shape[1]):
            new, old = x[b, i].double(), base[b, i].double()
            ratio = sum((new - old) ** 2) / sum(old**2)
            out[b, i] = error[b, i].double() * math.exp(-beta * float(ratio))
    return out.to(error.dtype)
