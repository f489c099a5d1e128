"""Count the queries that are nearest to each prompt token, by stock torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tachyscope.kernels.hashing import int8_scores, quantise


def count_nearest(q: Tensor, k: Tensor, log_count: Tensor) -> Tensor:
    """How many of q [B, H, S, D] score best, by int8 codes and log_count [B, H, n], at each of k.

    k [B, H, n, D]; the counts are [B, H, n], 0 for an empty slot.
    """
    scores = int8_scores(q, *quantise(k)) + log_count.clamp(min=-1e30).unsqueeze(2)
    near = scores.argmax(-1)
    hits = torch.zeros_like(log_count, dtype=torch.int64)
    hits.scatter_add_(2, near, torch.ones_like(near))
    return hits.masked_fill(log_count == -math.inf, 0)
