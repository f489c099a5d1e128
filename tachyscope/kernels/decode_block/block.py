"""What a block of a small transformer is made of, and memory that its programs share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tachyscope.kernels.decode_mlp.mlp import COPIES, MlpWeights
from tachyscope.kernels.gemv.weights import Norm, Weight

BARRIERS = 4  # that a launch waits at


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """x += out · attention(qkv · norm(x)), then the MLP."""

    norm: Norm
    qkv: tuple[Weight, Weight, Weight]
    out: Weight
    mlp: MlpWeights

    @property
    def is_plain(self) -> bool:
        """Whether it has layer norms, biases, an ungated MLP and as many key as query heads."""
        linears = (*self.qkv, self.out, self.mlp.up, self.mlp.down)
        return (
            self.norm.bias is not None
            and self.mlp.norm.bias is not None
            and self.mlp.gate is None
            and all(linear.bias is not None for linear in linears)
            and len({linear.rows for linear in (*self.qkv, self.out)}) == 1
        )


class BlockMemory:
    """For x [B, W]: one serves all blocks of a model."""

    def __init__(self, x: Tensor, inner: int) -> None:
        rows, width = x.shape
        self.qkv, self.attended = x.new_empty(rows, 3 * width), x.new_empty(rows, width)
        self.inner, self.normed = x.new_empty(rows, inner), x.new_empty(COPIES, rows, width)

    @staticmethod
    def barriers(count: int, device: torch.device) -> Tensor:
        """Zeros for `count` launches; they are 0 before every one."""
        return torch.zeros(count, BARRIERS, dtype=torch.int32, device=device)
