"""A layer of the trunk, or a block of the depth transformer: four operations for a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tachyscope.decode.parts import LayerParts
from tachyscope.decode.quantise import norm_of, weight_of
from tachyscope.kernels.decode_attention import Scratch, Step
from tachyscope.kernels.decode_mlp import COPIES, Error, Kept, MlpWeights
from tachyscope.kernels.gemv import Norm, Weight
from tachyscope.kernels.token_gate import GateState

if TYPE_CHECKING:
    from tachyscope.decode.cpu import Operations
    from tachyscope.decode.launches import Launches


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """x += out · attention(qkv · norm(x)), then the MLP."""

    norm: Norm
    qkv: tuple[Weight, Weight, Weight]
    out: Weight
    mlp: MlpWeights


def layer_weights(parts: LayerParts) -> LayerWeights:
    """A layer's weights as kernels read them."""
    gate = None if parts.gate is None else weight_of(parts.gate)
    return LayerWeights(
        norm_of(parts.attention_norm),
        (weight_of(parts.q), weight_of(parts.k), weight_of(parts.v)),
        weight_of(parts.o),
        MlpWeights(norm_of(parts.mlp_norm), gate, weight_of(parts.up), weight_of(parts.down)),
    )


class Layers:
    """Layers, and memory that they share: x [B, W] is the residual stream, changed in place.

    Of `tokens` tokens in a row x is [B * tokens, W], each row's one after the other.
    """

    def __init__(
        self, weights: Sequence[LayerWeights], x: Tensor, scratch: Scratch, tokens: int = 1
    ) -> None:
        self.weights = weights
        self.x, self.scratch, self.tokens = x, scratch, tokens
        first, rows = self.weights[0], len(x)
        self.qkv = x.new_empty(rows, sum(weight.rows for weight in first.qkv))
        self.attended = x.new_empty(rows, first.qkv[0].rows)
        self.inner = x.new_empty(rows, first.mlp.up.rows)
        self.normed = x.new_empty(COPIES, *x.shape) if tokens == 1 else None
        self.slices: list[MlpWeights] = []  # of the layers' MLPs

    def add_slices(self, slices: list[MlpWeights]) -> None:
        """Parts of the layers' MLPs, which a step may run instead."""
        self.slices, most = slices, max(self.inner.shape[1], *(part.up.rows for part in slices))
        self.inner = self.x.new_empty(len(self.x), most)

    def barriers(self, *count: int) -> Tensor:
        """Zeros for `step`: one for every layer."""
        size = (*count, len(self.weights))
        return torch.zeros(size, dtype=torch.int32, device=self.x.device)

    def step(
        self,
        to: Launches | Operations,
        steps: Sequence[Step],
        kept: Sequence[Kept | Error | None],
        barriers: Tensor,
        sliced: bool = False,
        gates: Sequence[GateState] = (),
    ) -> None:
        """Through all layers, or slices of their MLPs; barriers [layers] are 0.

        Where MLPs are replayed by their inputs, `gates` decide before each.
        """
        for i, layer in enumerate(self.weights):
            mlp = self.slices[i] if sliced else layer.mlp
            to.gemv(self.qkv, self.x, layer.qkv, layer.norm)
            to.attend(self, steps[i])
            to.gemv(self.x, self.attended, (layer.out,), add=True)
            if gates:
                to.decide(self.x, mlp.norm, gates[i])
            to.mlp(self, mlp, kept[i], barriers[i])
