"""One token through the trunk: four launches a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tachyscope.decode.int8 import norm_of, weight_of
from tachyscope.decode.parts import TrunkLayerParts
from tachyscope.kernels.decode_attention import Scratch, Step, decode_attention
from tachyscope.kernels.decode_mlp import Kept, MlpWeights, decode_mlp
from tachyscope.kernels.gemv import Norm, Weight, gemv


@dataclass(frozen=True, slots=True)
class TrunkLayer:
    """A layer's weights as kernels read them."""

    norm: Norm
    qkv: tuple[Weight, Weight, Weight]
    out: Weight
    mlp: MlpWeights

    @classmethod
    def of(cls, parts: TrunkLayerParts) -> TrunkLayer:
        return cls(
            norm_of(parts.attention_norm),
            (weight_of(parts.q), weight_of(parts.k), weight_of(parts.v)),
            weight_of(parts.o),
            MlpWeights(
                norm_of(parts.mlp_norm), *(weight_of(x) for x in (parts.gate, parts.up, parts.down))
            ),
        )

    @property
    def bytes(self) -> int:
        return sum(weight.bytes for weight in (*self.qkv, self.out, *self.mlp.parts))


class Trunk:
    """The layers, and memory that they share: x [B, W] is the residual stream, changed in place."""

    def __init__(self, layers: Sequence[TrunkLayer], x: Tensor, scratch: Scratch) -> None:
        self.layers, self.x, self.scratch = layers, x, scratch
        first, rows = layers[0], len(x)
        self.qkv = x.new_empty(rows, sum(weight.rows for weight in first.qkv))
        self.attended = x.new_empty(rows, first.qkv[0].rows)
        self.inner = x.new_empty(rows, max(layer.mlp.up.rows for layer in layers))
        self.barriers = torch.zeros(len(layers), dtype=torch.int32, device=x.device)

    def step(self, steps: Sequence[Step], kept: Sequence[Kept | None]) -> None:
        self.barriers.zero_()
        for i, layer in enumerate(self.layers):
            gemv(self.qkv, self.x, layer.qkv, layer.norm)
            decode_attention(self.attended, self.qkv, steps[i], self.scratch)
            gemv(self.x, self.attended, (layer.out,), add=True)
            inner = self.inner[:, : layer.mlp.up.rows]
            decode_mlp(self.x, layer.mlp, kept[i], inner, self.barriers[i])
