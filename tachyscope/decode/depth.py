"""A token's D codes by the depth transformer: a position a pass, earlier ones in its cache."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tachyscope.decode.layer import Layers, layer_weights
from tachyscope.decode.parts import DepthParts
from tachyscope.decode.quantise import norm_of, weight_of
from tachyscope.kernels.decode_attention import Entries, Scratch, Step
from tachyscope.kernels.gemv import Weight
from tachyscope.kernels.sample_code import Codes, Draw

if TYPE_CHECKING:
    from tachyscope.decode.cpu import Operations
    from tachyscope.decode.launches import Launches


class Depth:
    """The depth transformer on memory of its own, for states `hidden` [B, W] of B rows."""

    def __init__(self, parts: DepthParts, draw: Draw, hidden: Tensor) -> None:
        self.draw, self.hidden = draw, hidden
        self.norm, self.classifier = norm_of(parts.norm), weight_of(parts.classifier)
        self.books, rows, count = [*parts.books], len(hidden), len(parts.positions)
        # a position's embedding is part of its input's bias
        first, later = weight_of(parts.from_hidden), weight_of(parts.from_codes)
        self.inputs = [
            _moved(later if d else first, parts.positions[d].detach()) for d in range(count)
        ]
        width = parts.positions.shape[1]
        self.x, head_dim = hidden.new_empty(rows, width), width // parts.heads
        scratch = Scratch(rows, parts.heads, parts.heads, head_dim, hidden.device)
        self.blocks = Layers([layer_weights(part) for part in parts.blocks], self.x, scratch)
        self.barriers = self.blocks.barriers(count)
        self.kept = [None] * len(parts.blocks)
        self.total = hidden.new_empty(rows, parts.books[0].shape[1])
        fine = torch.promote_types(hidden.dtype, torch.float32)
        self.logits = torch.empty(rows, parts.codes, dtype=fine, device=hidden.device)
        size = (rows, parts.heads, count, head_dim)
        caches = [(hidden.new_zeros(size), hidden.new_zeros(size)) for _ in parts.blocks]
        slots = torch.arange(count, dtype=torch.int32, device=hidden.device)
        self.steps = [
            [Step(Entries(*cache, slot), parts.heads, slot) for cache in caches] for slot in slots
        ]

    def step(self, to: Launches | Operations, codes: Tensor, noise: Tensor, place: Tensor) -> None:
        """Draw the codes [V, N, D] at a place; `total` becomes the sum of their entries, by row."""
        to.clear(self.barriers)
        for d, weight in enumerate(self.inputs):
            to.gemv(self.x, self.total if d else self.hidden, (weight,))
            self.blocks.step(to, self.steps[d], self.kept, self.barriers[d])
            to.gemv(self.logits, self.x, (self.classifier,), self.norm)
            drawn = Codes(codes, noise, place, d, self.books[d], self.total)
            to.sample(self.logits, self.draw, drawn)


def _moved(weight: Weight, by: Tensor) -> Weight:
    bias = by if weight.bias is None else weight.bias + by
    return replace(weight, bias=bias.contiguous())
