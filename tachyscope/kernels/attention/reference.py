"""The definition of attention, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, log_count: Tensor | None = None, causal: bool = False
) -> Tensor:
    """The definition, in float64, with every head's entries written out."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = q.double() @ k.mT / math.sqrt(q.shape[-1])
    if log_count is not None:
        wide = log_count if log_count.shape[1] == 1 else log_count.repeat_interleave(group, 1)
        scores = scores + wide.double().unsqueeze(2)
    if causal:
        s, n = scores.shape[-2:]
        later = torch.arange(n, device=q.device) > torch.arange(n - s, n, device=q.device)[:, None]
        scores = scores.masked_fill(later, -math.inf)
    return (scores.softmax(-1) @ v).to(q.dtype)
