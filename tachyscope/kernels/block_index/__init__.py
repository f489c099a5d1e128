"""Index past entries by blocks: buckets that order them, codes of blocks, a tile's mass on each."""

from __future__ import annotations

from torch import Tensor, int8

from tachyscope.kernels import hashing
from tachyscope.kernels.block_index import torch as torch_backend
from tachyscope.kernels.block_index.torch import LOWEST, Codes, entry_mass
from tachyscope.kernels.codes import Past
from tachyscope.kernels.device import BLOCKS, HAS_TRITON, TILES, has_kernel, reads_keys

if HAS_TRITON:
    from tachyscope.kernels.block_index import triton as triton_backend

__all__ = ["LOWEST", "Codes", "block_mass", "buckets", "encode_blocks", "entry_mass", "mean_mass"]

# queries of a tile that score the blocks of a bank: its own, or means of neighbours
MEANS = 16


def buckets(x: Tensor, bits: int) -> Tensor:
    """The pattern of signs of x [B, H, n, D] on so many random planes, as one number."""
    if reads_keys(x):
        return triton_backend.buckets(x, bits)
    return hashing.buckets(x, bits)


def encode_blocks(past: Past, log_count: Tensor, block: int, codes: Codes, first: int = 0) -> None:
    """Write the code [B, Hkv, most, E] of every block of past keys from `first` on, its scale
    [B, Hkv, most, 1], and the log of its weight [B, Hkv, most].

    A code of int8 is the block's mean key; one of floats the mean signs of its keys on E planes,
    whose scale is the keys' mean norm. log_count [B, Hkv, blocks * block], -inf for a slot without
    an entry.
    """
    if codes.code.dtype == int8 and block <= max(BLOCKS) and reads_keys(past.k):
        triton_backend.encode_blocks(past, log_count, block, codes)  # all: it is one launch
    else:
        torch_backend.encode_blocks(past, log_count, block, codes, first)


def block_mass(q: Tensor, codes: Codes, blocks: int, tile: int) -> Tensor:
    """Each tile's sum over its queries q [B, H, S, D] of their softmax over the first blocks.

    A query's score of a block is estimated by the block's code, plus the block's weight. The
    masses are [B, H, tiles, blocks].
    """
    if codes.code.dtype == int8 and tile in TILES and has_kernel(q.device, q.dtype, q.shape[3]):
        return triton_backend.block_mass(q, codes, blocks, tile)
    return torch_backend.block_mass(q, codes, blocks, tile)


def mean_mass(q: Tensor, codes: Codes, blocks: int, tile: int) -> Tensor:
    """`block_mass` where blocks are very many: a tile scores them by MEANS mean queries at most.

    A mean is of tile / MEANS queries in a row, and the masses are sums over the means. A block
    whose weight says that it has no entry has the mass -1.
    """
    group = max(1, tile // MEANS)
    if group > 1 and tile % MEANS == 0:
        q, tile = torch_backend.mean_queries(q, group), MEANS
        if codes.code.dtype == int8 and has_kernel(q.device, q.dtype, q.shape[3]):
            return triton_backend.mean_mass(q, codes, blocks, tile)
    mass = block_mass(q, codes, blocks, tile)
    none = codes.weight[:, :, :blocks] <= LOWEST
    return mass.masked_fill(none.repeat_interleave(q.shape[1] // none.shape[1], 1).unsqueeze(2), -1)
