"""Attention over listed blocks of the past, and all present entries (block-sparse)."""

from __future__ import annotations

from torch import Tensor

from tachyscope.kernels.attention import hopper_backend
from tachyscope.kernels.block_sparse import torch as torch_backend
from tachyscope.kernels.block_sparse.torch import Read
from tachyscope.kernels.block_table import BlockTable
from tachyscope.kernels.codes import decode
from tachyscope.kernels.device import (
    BLOCKS,
    HAS_TRITON,
    TILES,
    has_kernel,
    host_may_read,
)

if HAS_TRITON:
    from tachyscope.kernels.block_sparse import triton as triton_backend

__all__ = ["BlockTable", "Read", "block_sparse_attention", "pairs_of"]


def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, past: BlockTable, kept: tuple[Tensor, ...] = ()
) -> Read:
    """Attention of q [B, H, S, D] over each tile's blocks of the past and all present entries k, v.

    Present entries [B, Hkv, n, D] are of weight one. `kept` is what the last call with the same
    table gave back.
    """
    sizes = past.tile in TILES and past.block in BLOCKS
    alike = v.dtype == q.dtype and v.shape[3] == q.shape[3]
    if sizes and alike and has_kernel(q.device, k.dtype, q.shape[3]):
        return Read(_flash(q, k, v, past), pairs_of(q, k, past))
    if past.ragged and host_may_read(q):
        return torch_backend.read_ragged(q, k, v, past)
    return torch_backend.read_tiles(q, k, v, past, kept)


def _flash(q: Tensor, k: Tensor, v: Tensor, past: BlockTable) -> Tensor:
    # the kernels read no codes: on an H200 that takes twice as long as to decode a layer first
    past = past._replace(
        k=decode(past.k, past.k_scale, k.dtype), v=decode(past.v, past.v_scale, v.dtype)
    )
    if past.tile % 128 == 0 and hopper_backend(q.device) is not None:
        from tachyscope.kernels.block_sparse import hopper

        return hopper.block_sparse_attention(q, k, v, past)
    return triton_backend.block_sparse_attention(q, k, v, past)


def pairs_of(q: Tensor, k: Tensor, past: BlockTable) -> int | Tensor:
    """The pairs that are scored where each tile reads its own blocks and no more."""
    most = k.shape[2] + (0 if past.ragged else past.ids.shape[3] * past.block)
    pairs = q.shape[:3].numel() * most
    if not past.ragged:
        return pairs
    tiles = -(-q.shape[2] // past.tile)
    counts = past.counts[:, :, :tiles].sum((0, 1))
    whole = counts.sum() * past.tile - counts[-1] * (tiles * past.tile - q.shape[2])
    return whole * past.block + pairs
