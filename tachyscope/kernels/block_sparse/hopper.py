"""Attention over listed blocks on a Hopper GPU: the kernel of `attention`, given a list (Gluon)."""

from __future__ import annotations

from torch import Tensor

from tachyscope.kernels.attention.hopper import flash
from tachyscope.kernels.block_table import BlockTable


def block_sparse_attention(q: Tensor, k: Tensor, v: Tensor, past: BlockTable) -> Tensor:
    """Attention over listed blocks of the past and all present entries k, v, of weight one."""
    return flash(q, k, v, None, past)
