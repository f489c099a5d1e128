"""Copy blocks of entries between a cache and host memory, as they are or as codes."""

from __future__ import annotations

from torch import Tensor

from tachyscope.kernels.device import HAS_TRITON
from tachyscope.kernels.host_blocks import torch as torch_backend
from tachyscope.kernels.host_blocks.torch import HostBlocks, block_index

if HAS_TRITON:
    from tachyscope.kernels.host_blocks import triton as triton_backend

__all__ = ["HostBlocks", "block_index", "load_blocks", "store_blocks"]


def store_blocks(k: Tensor, v: Tensor, places: Tensor, host: HostBlocks, ids: Tensor) -> None:
    """Copy the blocks that stand at places [B, H, n] of k, v to the host's blocks `ids` [B, H, n].

    k, v [B, H, places * block, D] are a part of a cache, places and ids int32.
    """
    backend = torch_backend if k.is_cpu else triton_backend
    backend.store_blocks(k, v, places, host, ids)


def load_blocks(host: HostBlocks, ids: Tensor, k: Tensor, v: Tensor) -> None:
    """Write the host's blocks `ids` [B, H, places] to k, v [B, H, places * block, D].

    Where an id is below 0 the place stays as it is.
    """
    backend = torch_backend if k.is_cpu else triton_backend
    backend.load_blocks(host, ids, k, v)
