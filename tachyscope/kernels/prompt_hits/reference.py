"""The definition of a prompt token's hits, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def count_nearest_reference(q: Tensor, k: Tensor, log_count: Tensor) -> Tensor:
    """Query by query: which token's int8 code scores best, its log_count added."""

    def code(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = x.double().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        return (x.double() / scale).round(), scale

    (q_code, q_scale), (k_code, k_scale) = code(q), code(k)
    scores = q_code @ k_code.mT * q_scale * k_scale.mT / math.sqrt(q.shape[3])
    scores = scores + log_count.double().unsqueeze(2)
    hits = torch.zeros(log_count.shape, dtype=torch.int64)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for row in scores[b, h]:
                if row.max() > -math.inf:
                    hits[b, h, row.argmax()] += 1
    return hits
