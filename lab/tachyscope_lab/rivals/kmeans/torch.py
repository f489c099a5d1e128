"""Lloyd's iterations by stock torch."""

from __future__ import annotations

import torch
from torch import Tensor

# distances worked out at once: bounds memory, not the result
AT_ONCE = 2**26


def nearest(x: Tensor, centroids: Tensor) -> Tensor:
    """The nearest centroid [B, H, K, D] of each of x [B, H, n, D]: [B, H, n]."""
    half = centroids.square().sum(-1).unsqueeze(2) / 2
    parts = [
        (part.to(centroids.dtype) @ centroids.mT - half).argmax(-1)
        for part in x.split(_rows(x, centroids.shape[2]), 2)
    ]
    return torch.cat(parts, 2)


def sum_clusters(x: Tensor, weight: Tensor, label: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Sums [B, H, K, D] of the vectors of each cluster, `weight` times each, and their weights.

    By a product, since a GPU that scatters adds up in any order.
    """
    total, size = [torch.zeros((), dtype=weight.dtype, device=x.device)] * 2
    for start in range(0, x.shape[2], rows := _rows(x, count)):
        part = slice(start, start + rows)
        member = label[:, :, part, None] == torch.arange(count, device=x.device)
        member = member.to(weight.dtype) * weight[:, :, part, None]
        total = total + member.mT @ x[:, :, part].to(weight.dtype)
        size = size + member.sum(2)
    return total, size


def _rows(x: Tensor, clusters: int) -> int:
    return max(1, AT_ONCE // (x.shape[0] * x.shape[1] * clusters))
