"""Where the Triton kernels serve, and stock torch does not: the one place that asks."""

from __future__ import annotations

import torch

try:
    from tachyscope.kernels import blocks as blocks
    from tachyscope.kernels import flash as flash
    from tachyscope.kernels import folding as folding
    from tachyscope.kernels import match as match
    from tachyscope.kernels import nearest as nearest
    from tachyscope.kernels import turning as turning
except ImportError:  # without Triton stock torch serves all
    blocks = flash = folding = match = nearest = turning = None  # type: ignore[assignment]

# a device without data ("meta") stands for one that has them, so that its memory can be told
DEVICES, DTYPE, HEAD_DIMS = ("cuda", "meta"), torch.bfloat16, (64, 128)
# queries that read the same blocks, and entries of a block
TILES, BLOCKS = (64, 128), (32, 64, 128)


def suits(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernels serve such heads there."""
    known = device.type in DEVICES and dtype == DTYPE and head_dim in HEAD_DIMS
    return known and flash is not None
