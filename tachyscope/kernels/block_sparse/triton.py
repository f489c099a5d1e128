"""Attention over listed blocks on a GPU: the flash kernel of `attention`, given a list (Triton)."""

from __future__ import annotations

from torch import Tensor

from tachyscope.kernels.attention.triton import Setting, flash, setting_of
from tachyscope.kernels.block_table import BlockTable


def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, past: BlockTable, setting: Setting | None = None
) -> Tensor:
    """Attention over listed blocks of the past and all present entries k, v, of weight one."""
    return flash(q, k, v, None, past, setting or setting_of(q.device, past.tile, past.block))
