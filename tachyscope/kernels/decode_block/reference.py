"""The definition of a block, in float64."""

from __future__ import annotations

from torch import Tensor

from tachyscope.kernels.decode_attention.reference import decode_attention_reference
from tachyscope.kernels.decode_attention.step import Step
from tachyscope.kernels.decode_block.block import BlockWeights
from tachyscope.kernels.decode_mlp.reference import decode_mlp_reference
from tachyscope.kernels.gemv.reference import gemv_reference


def decode_block_reference(x: Tensor, block: BlockWeights, step: Step) -> Tensor:
    """x after the block; the entry is kept as it is rounded."""
    qkv = gemv_reference(x, block.qkv, block.norm).to(x.dtype)
    attended = decode_attention_reference(qkv, step)
    return decode_mlp_reference(x + gemv_reference(attended, (block.out,)), block.mlp)
