"""Read the first entries and the newest (StreamingLLM), whatever the cache holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from tachyscope.attention import (
    NEWEST,
    PAST_WEIGHT,
    WEIGHT_NEWEST,
    WEIGHTS,
    AttentionPolicy,
    attend,
)
from tachyscope.attention.dense import read_all
from tachyscope.core.limits import ENTRIES, LATENTS
from tachyscope.core.policy import setting
from tachyscope.core.types import PassContext
from tachyscope.store import LayerPass


@final
@dataclass(frozen=True)
class WindowAttention(AttentionPolicy, name="window"):
    """Read the first `sink` entries and the newest `tokens`, the current ones included.

    In token models a query is one of its own `tokens`; a chunk's tokens all read each other and
    `tokens` of the past. It is the sparse attention that FastCar is combined with.
    """

    tokens: int = setting(
        16,
        "Newest entries that a query reads: in token models its own counts, else past ones.",
        bound=ENTRIES,
    )
    sink: int = setting(
        4,
        "First entries that every query reads, a prompt's padding left out. In token models they "
        "are the prompt's: fewer than it has hide the rest of it.",
        bound=LATENTS,
    )
    past_weight: float | None = setting(None, PAST_WEIGHT, bound=WEIGHTS)
    newest: int | None = setting(None, WEIGHT_NEWEST, bound=LATENTS)

    paper: ClassVar[str] = "StreamingLLM, arXiv 2309.17453, as in FastCar, arXiv 2505.14709"
    splits_heads: ClassVar[bool] = True

    def weighed(self, ctx: PassContext) -> slice:
        newest = NEWEST if self.newest is None else self.newest
        first = min(ctx.past, max(ctx.left_padding, default=0) + self.sink)
        return slice(first, max(first, ctx.past - newest * ctx.shape.tokens_per_frame))

    def attend(self, p: LayerPass, q: Tensor) -> Tensor:
        ctx = p.ctx
        near = self.tokens if ctx.shape.token_by_token else self.tokens + ctx.tokens
        pads = ctx.left_padding or (0,) * q.shape[0]
        if ctx.end <= self.sink + min(pads) + near:
            p.work.add_reads(q, ctx.end)
            weights = self.log_weights(p) if self.weighs(ctx) else None
            return read_all(p, q, weights)
        if ctx.shape.token_by_token and ctx.tokens > 1:
            return self._attend_in_order(p, q)
        if ctx.end <= self.sink + max(pads) + near:
            return self._attend_some(p, q, pads)
        p.work.add_reads(q, self.sink + near)
        sinks = [slice(p, p + self.sink) for p in pads]
        first = sinks[0] if len(set(pads)) == 1 else sinks
        plain = ctx.plain and not self.weighs(ctx)
        log_count = None if plain else self.log_weights(p)
        return attend(
            ctx.shape,
            q,
            *p.layer.read(ctx, first, slice(ctx.end - near, ctx.end), log_count=log_count),
        )

    def _attend_some(self, p: LayerPass, q: Tensor, pads: Sequence[int]) -> Tensor:
        """A token's attention where rows of longer prompts leave entries out, and others do not."""
        ctx = p.ctx
        p.work.add_reads(q, ctx.end)  # what is left out is scored, then masked
        log_count = p.layer.log_count[:, :, : ctx.end].clone()
        for row, first in enumerate(pads):
            log_count[row, :, first + self.sink : max(0, ctx.end - self.tokens)] = -torch.inf
        return read_all(p, q, log_count)

    def _attend_in_order(self, p: LayerPass, q: Tensor) -> Tensor:
        """A pass of several tokens of a token model: each reads as if it came alone."""
        out = [self.attend(p.token(i), q[:, :, i : i + 1]) for i in range(p.ctx.tokens)]
        return torch.cat(out, 2)
