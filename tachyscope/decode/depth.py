"""A token's D codes by the depth transformer: a position a pass, earlier ones in its cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tachyscope.decode.int8 import norm_of, weight_of
from tachyscope.decode.parts import DepthBlockParts, DepthParts
from tachyscope.kernels.decode_attention import Entries, Scratch, Step, decode_attention
from tachyscope.kernels.decode_mlp import MlpWeights, decode_mlp
from tachyscope.kernels.gemv import Norm, Weight, gemv
from tachyscope.kernels.sample_code import Codes, Draw, sample_code


@dataclass(frozen=True, slots=True)
class DepthBlock:
    """A block's weights as kernels read them."""

    norm: Norm
    qkv: tuple[Weight, Weight, Weight]
    out: Weight
    mlp: MlpWeights

    @classmethod
    def of(cls, parts: DepthBlockParts) -> DepthBlock:
        return cls(
            norm_of(parts.attention_norm),
            (weight_of(parts.q), weight_of(parts.k), weight_of(parts.v)),
            weight_of(parts.o),
            MlpWeights(norm_of(parts.mlp_norm), None, weight_of(parts.up), weight_of(parts.down)),
        )

    @property
    def bytes(self) -> int:
        return sum(weight.bytes for weight in (*self.qkv, self.out, *self.mlp.parts))


class Depth:
    """The depth transformer on memory of its own, for states `hidden` [B, W] of B rows."""

    def __init__(self, parts: DepthParts, draw: Draw, hidden: Tensor) -> None:
        self.draw, self.hidden = draw, hidden
        self.blocks = [DepthBlock.of(part) for part in parts.blocks]
        self.norm, self.classifier = norm_of(parts.norm), weight_of(parts.classifier)
        self.books, rows, count = [*parts.books], len(hidden), len(parts.positions)
        # a position's embedding is part of its input's bias
        first, later = weight_of(parts.from_hidden), weight_of(parts.from_codes)
        self.inputs = [
            _moved(later if d else first, parts.positions[d].detach()) for d in range(count)
        ]
        width = parts.positions.shape[1]
        self.x = hidden.new_empty(rows, width)
        self.qkv, self.attended = hidden.new_empty(rows, 3 * width), hidden.new_empty(rows, width)
        self.inner = hidden.new_empty(rows, self.blocks[0].mlp.up.rows)
        self.total = hidden.new_empty(rows, parts.books[0].shape[1])
        fine = torch.promote_types(hidden.dtype, torch.float32)
        self.logits = torch.empty(rows, parts.codes, dtype=fine, device=hidden.device)
        size = (rows, parts.heads, count, width // parts.heads)
        self.caches = [(hidden.new_zeros(size), hidden.new_zeros(size)) for _ in self.blocks]
        self.slots = torch.arange(count, dtype=torch.int32, device=hidden.device)
        self.heads = parts.heads
        self.scratch = Scratch(rows, self.heads, self.heads, size[-1], hidden.device)
        shape = (count, len(self.blocks))
        self.barriers = torch.zeros(shape, dtype=torch.int32, device=hidden.device)

    @property
    def bytes(self) -> int:
        """Of weights, what a token reads."""
        per_pass = sum(block.bytes for block in self.blocks) + self.classifier.bytes
        return len(self.inputs) * per_pass + sum(x.bytes for x in self.inputs)

    def step(self, codes: Tensor, noise: Tensor, place: Tensor) -> None:
        """Draw the codes at a place; `total` is then the sum of their entries, in every row."""
        self.barriers.zero_()
        for d, weight in enumerate(self.inputs):
            gemv(self.x, self.total if d else self.hidden, (weight,))
            for i, block in enumerate(self.blocks):
                gemv(self.qkv, self.x, block.qkv, block.norm)
                entries = Entries(*self.caches[i], self.slots[d])
                step = Step(entries, self.heads, self.slots[d])
                decode_attention(self.attended, self.qkv, step, self.scratch)
                gemv(self.x, self.attended, (block.out,), add=True)
                decode_mlp(self.x, block.mlp, None, self.inner, self.barriers[d, i])
            gemv(self.logits, self.x, (self.classifier,), self.norm)
            drawn = Codes(codes, noise, place, d, self.books[d], self.total)
            sample_code(self.logits, self.draw, drawn)


def _moved(weight: Weight, by: Tensor) -> Weight:
    bias = by if weight.bias is None else weight.bias + by
    return replace(weight, bias=bias.contiguous())
