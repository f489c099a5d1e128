"""A whole block of the depth transformer for one position, in one launch."""

from __future__ import annotations

from torch import Tensor

from tachyscope.kernels.decode_attention import Step
from tachyscope.kernels.decode_block import torch as torch_backend
from tachyscope.kernels.decode_block.block import BARRIERS, BlockMemory, BlockWeights
from tachyscope.kernels.device import HAS_TRITON, has_decode_kernel

if HAS_TRITON:
    from tachyscope.kernels.decode_block import triton as triton_backend

__all__ = [
    "BARRIERS",
    "BlockMemory",
    "BlockWeights",
    "decode_block",
    "in_one_launch",
]
# bits of weights and rows for which one launch is faster than four (scripts/choose_decode.py): on
# an H200 none, since the four were tuned (a pair: 65 us, the sum of the four 61; one row 55 and 50)
FASTER: set[tuple[int, int]] = set()


def in_one_launch(x: Tensor, block: BlockWeights) -> bool:
    """Whether a GPU runs such a block in one launch; else it runs by its four parts."""
    return (block.mlp.up.bits, len(x)) in FASTER and has_decode_kernel(x) and block.is_plain


def decode_block(
    x: Tensor, block: BlockWeights, step: Step, memory: BlockMemory, barriers: Tensor
) -> None:
    """x [B, W] through a plain block; the token's entry is put into the step's slot.

    `barriers` [4] int32 are 0 before every call.
    """
    if has_decode_kernel(x):
        triton_backend.decode_block(x, block, step, memory, barriers)
    else:
        torch_backend.decode_block(x, block, step)
