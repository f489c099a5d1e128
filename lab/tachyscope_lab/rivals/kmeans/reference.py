"""The definition of Lloyd's iterations, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def kmeans_reference(
    x: Tensor, weight: Tensor, centroids: Tensor, spare: Tensor, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Vector by vector; labels, weights of clusters, and where the centroids went."""
    x, centroids = x.double(), centroids.double().clone()
    label = torch.zeros(x.shape[:3], dtype=torch.int64)
    size = torch.zeros(centroids.shape[:3], dtype=torch.float64)
    for _ in range(iterations):
        for b in range(x.shape[0]):
            for h in range(x.shape[1]):
                own = centroids[b, h]
                for i, vector in enumerate(x[b, h]):
                    label[b, h, i] = (own - vector).square().sum(-1).argmin()
                for j in range(len(own)):
                    held = label[b, h] == j
                    heavy = weight[b, h, held].double()
                    size[b, h, j] = heavy.sum()
                    if size[b, h, j] > 0:
                        own[j] = (x[b, h, held] * heavy[:, None]).sum(0) / size[b, h, j]
                    else:
                        own[j] = x[b, h, spare[j]]
    return label, size, centroids
