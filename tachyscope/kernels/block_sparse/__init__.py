"""Attention over listed entries only."""

from __future__ import annotations

from torch import Tensor

from tachyscope.kernels.attention import hopper_backend
from tachyscope.kernels.block_sparse.torch import gather_entries, listed_attention
from tachyscope.kernels.block_table import Listed
from tachyscope.kernels.device import HAS_TRITON

if HAS_TRITON:
    from tachyscope.kernels.block_sparse import triton as triton_backend

__all__ = ["Listed", "flash_listed", "gather_entries", "listed_attention"]


def flash_listed(q: Tensor, k: Tensor, v: Tensor, past: Listed) -> Tensor:
    """Attention over listed blocks of the past and all present entries k, v, of weight one."""
    if past.tile % 128 == 0 and hopper_backend(q.device) is not None:
        from tachyscope.kernels.block_sparse import hopper

        return hopper.flash_listed(q, k, v, past)
    return triton_backend.flash_listed(q, k, v, past)
