"""Settle which blocks of a bank are resident, and which of those that are each tile reads."""

from __future__ import annotations

from torch import Tensor, arange, float32

from tachyscope.kernels.admit import torch as torch_backend
from tachyscope.kernels.admit.torch import Residency, at_or, note, or_last
from tachyscope.kernels.device import HAS_TRITON

if HAS_TRITON:
    from tachyscope.kernels.admit import triton as triton_backend

__all__ = ["Residency", "admit", "at_or", "best_places", "note", "or_last"]

# what one program of the Triton kernels takes: blocks of a head, and its places
BLOCKS, PLACES = 2**15, 2**10


def admit(mass: Tensor, ids: Tensor | None, residency: Residency, at_once: int) -> Tensor:
    """Settle which blocks are resident from now on, and which of them are to be fetched.

    Tiles want blocks ids [B, H, tiles, n] by their mass on each; without ids every block by its
    mass [B, H, tiles, most], which is below 0 where it is empty. All that are wanted become
    resident, of largest summed mass first, that of resident ones counted `STAY` times; then those
    wanted last. The first `at_once` of a head that are to be fetched are so at once: which block
    [B, Hkv, places] then stands in each place.
    """
    fits = residency.wanted.shape[2] <= BLOCKS and residency.block.shape[2] <= PLACES
    backend = triton_backend if HAS_TRITON and mass.is_cuda and fits else torch_backend
    return backend.admit(mass, ids, residency, at_once)


def best_places(mass: Tensor, blocks: Tensor, out: Tensor, sink: int) -> None:
    """Write where a tile's n best among the resident blocks [B, Hkv, places] stand, in any order.

    mass [B, H, tiles, most] is what each tile has on all blocks: at least 0, or -1 for one that is
    empty, as which a place without a block counts. out [B, H, tiles, n] counts the sink's places.
    """
    places = blocks.shape[2]
    if out.shape[3] == places:  # all of them
        out.copy_(arange(sink, sink + places, device=out.device))
        return
    fits = mass.dtype == float32 and places <= PLACES
    backend = triton_backend if HAS_TRITON and mass.is_cuda and fits else torch_backend
    backend.best_places(mass, blocks, out, sink)
