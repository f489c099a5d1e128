"""Copy blocks of entries between a cache and host memory, as they are or as codes."""

from __future__ import annotations

from torch import Tensor

from tachyscope.kernels.device import HAS_TRITON
from tachyscope.kernels.host_blocks import torch as torch_backend
from tachyscope.kernels.host_blocks.torch import HostBlocks

if HAS_TRITON:
    from tachyscope.kernels.host_blocks import triton as triton_backend

__all__ = ["HostBlocks", "load_blocks", "store_blocks"]


def store_blocks(x: Tensor, host: HostBlocks, ids: Tensor) -> None:
    """Write entries x [B, H, n, D], cut into blocks, to the host's blocks `ids` [B, H, count].

    The last of the blocks may be a part: what is behind it in host memory is not defined.
    """
    if x.is_cpu:
        torch_backend.store_blocks(x, host, ids)
    else:
        triton_backend.store_blocks(x, host, ids)


def load_blocks(host: HostBlocks, ids: Tensor, out: Tensor) -> None:
    """Write the host's blocks `ids` [B, H, places] to out [B, H, places * block, D].

    Where an id is below 0 the place stays as it is.
    """
    if out.is_cpu:
        torch_backend.load_blocks(host, ids, out)
    else:
        triton_backend.load_blocks(host, ids, out)
