"""Clusters of vectors, by Lloyd's iterations."""

from __future__ import annotations

from torch import Tensor

from tachyscope.kernels.device import HAS_TRITON, has_kernel
from tachyscope_lab.rivals.kmeans import torch as torch_backend

if HAS_TRITON:
    from tachyscope_lab.rivals.kmeans import triton as triton_backend


def kmeans(
    x: Tensor, weight: Tensor, centroids: Tensor, spare: Tensor, iterations: int
) -> tuple[Tensor, Tensor]:
    """The cluster of each of x [B, H, n, D], [B, H, n], and each cluster's weight [B, H, K].

    centroids [B, H, K, D] in float32 are where to start, and are moved: to the mean of the vectors
    whose nearest they are, each counted weight [B, H, n] times, so often. One that is nearest to
    none goes to vector spare [K].
    """
    backend = triton_backend if has_kernel(x.device, x.dtype, x.shape[3]) else torch_backend
    for _ in range(iterations):
        label = backend.nearest(x, centroids)
        total, size = backend.sum_clusters(x, weight, label, centroids.shape[2])
        mean = total / size.clamp(min=1e-30).unsqueeze(-1)
        centroids.copy_(mean.where(size.unsqueeze(-1) > 0, x[:, :, spare].to(mean.dtype)))
    return label, size
