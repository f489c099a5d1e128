"""The definition of attention over listed entries, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def listed_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_count: Tensor,
    listed: Tensor,
    now: slice,
    causal: bool = False,
) -> Tensor:
    """The definition: all scores in float64, then minus infinity for what is not listed."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    log_count = log_count if log_count.shape[1] == 1 else log_count.repeat_interleave(group, 1)
    scores = q.double() @ k.mT / math.sqrt(q.shape[-1]) + log_count.double().unsqueeze(2)
    read = torch.zeros(*listed.shape[:2], k.shape[2] + 1, dtype=torch.bool, device=q.device)
    read.scatter_(2, torch.where(listed < 0, k.shape[2], listed), True)
    read = read[:, :, None, :-1].repeat(1, 1, q.shape[2], 1)
    read[..., now] = True
    if causal:
        own = torch.arange(k.shape[2], device=q.device)
        last = torch.arange(now.stop - q.shape[2], now.stop, device=q.device)
        read = read & (own <= last[:, None])
    return (scores.masked_fill(~read, -math.inf).softmax(-1) @ v).to(q.dtype)
