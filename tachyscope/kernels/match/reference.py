"""The definition of matching, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def best_older_reference(features: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """The definition, one entry at a time in float64."""
    x = features.double()
    b, g, n, _ = x.shape
    cosine = torch.full((b, g, n - first), -math.inf, dtype=torch.float64)
    partner = torch.zeros(b, g, n - first, dtype=torch.int64)
    for i in range(max(first, 1), n):
        best = (x[:, :, :i] @ x[:, :, i, :, None]).squeeze(-1).max(-1)
        cosine[:, :, i - first], partner[:, :, i - first] = best.values, best.indices
    return cosine.to(features.dtype), partner
