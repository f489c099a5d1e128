"""Count the queries that are nearest to each prompt token."""

from __future__ import annotations

from torch import Tensor

from tachyscope.kernels.device import HAS_TRITON, has_kernel
from tachyscope.kernels.prompt_hits import torch as torch_backend

if HAS_TRITON:
    from tachyscope.kernels.prompt_hits import triton as triton_backend


def count_nearest(q: Tensor, k: Tensor, log_count: Tensor) -> Tensor:
    """How many of q [B, H, S, D] score best, by int8 codes and log_count [B, H, n], at each of k.

    k [B, H, n, D]; the counts are [B, H, n], 0 for an empty slot.
    """
    if has_kernel(q.device, q.dtype, q.shape[3]):
        return triton_backend.count_nearest(q, k, log_count)
    return torch_backend.count_nearest(q, k, log_count)
