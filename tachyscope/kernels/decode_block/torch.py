"""A block by stock torch."""

from __future__ import annotations

from torch import Tensor

from tachyscope.kernels.decode_attention.step import Step
from tachyscope.kernels.decode_attention.torch import decode_attention
from tachyscope.kernels.decode_block.block import BlockWeights
from tachyscope.kernels.decode_mlp.torch import decode_mlp
from tachyscope.kernels.gemv.torch import gemv


def decode_block(x: Tensor, block: BlockWeights, step: Step) -> None:
    qkv = gemv(x.new_empty(len(x), 3 * x.shape[1]), x, block.qkv, block.norm)
    gemv(x, decode_attention(x.clone(), qkv, step), (block.out,), add=True)
    decode_mlp(x, block.mlp)
