"""Attention over listed entries only."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tachyscope.kernels.attention import attention


def listed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    logw: Tensor,
    listed: Tensor,
    now: slice,
    causal: bool = False,
) -> Tensor:
    """Attention of q [B, H, S, D] over entries `listed` [B, H, M] (-1: none) and all of `now`.

    k, v [B, Hkv, N, D], logw [B, Hkv or 1, N]. With `causal` the last S of now are the queries'.
    """
    group = q.shape[1] // k.shape[1]
    at = listed.clamp(min=0)
    parts = []
    for x in (k, v, logw):
        wide = x.repeat_interleave(group, 1) if x.shape[1] > 1 and group > 1 else x
        wide = wide.expand(-1, q.shape[1], *x.shape[2:])
        index = at if x.dim() == 3 else at.unsqueeze(-1).expand(-1, -1, -1, x.shape[3])
        parts.append((wide.gather(2, index), wide[:, :, now]))
    weights = parts[2][0].masked_fill(listed < 0, -math.inf)
    keys, values = (torch.cat(pair, 2) for pair in parts[:2])
    return attention(q, keys, values, torch.cat([weights, parts[2][1]], 2), causal)


def listed_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    logw: Tensor,
    listed: Tensor,
    now: slice,
    causal: bool = False,
) -> Tensor:
    """The definition: all scores in float64, then minus infinity for what is not listed."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    logw = logw if logw.shape[1] == 1 else logw.repeat_interleave(group, 1)
    scores = q.double() @ k.mT / math.sqrt(q.shape[-1]) + logw.double().unsqueeze(2)
    read = torch.zeros(*listed.shape[:2], k.shape[2] + 1, dtype=torch.bool, device=q.device)
    read.scatter_(2, torch.where(listed < 0, k.shape[2], listed), True)
    read = read[:, :, None, :-1].repeat(1, 1, q.shape[2], 1)
    read[..., now] = True
    if causal:
        own = torch.arange(k.shape[2], device=q.device)
        last = torch.arange(now.stop - q.shape[2], now.stop, device=q.device)
        read = read & (own <= last[:, None])
    return (scores.masked_fill(~read, -math.inf).softmax(-1) @ v).to(q.dtype)
