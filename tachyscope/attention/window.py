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
    """Read the first `sink` entries and the newest `tokens`.

    In token models the query's own entry is one of `tokens`; in chunk models the present chunk is
    read whole, beside `tokens` of the past. FastCar is combined with this sparse attention.
    """

    tokens: int = setting(
        16,
        "Newest entries that a query reads: in token models its own counts, else past ones.",
        bound=ENTRIES,
    )
    sink: int = setting(
        4,
        "First entries that every query reads, behind a prompt's padding. In token models a sink "
        "shorter than the prompt hides the rest of it.",
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
        """Attention of a token where some rows leave entries out and others do not."""
        ctx = p.ctx
        p.work.add_reads(q, ctx.end)  # masked entries are scored too
        log_count = p.layer.log_count[:, :, : ctx.end].clone()
        for row, first in enumerate(pads):
            log_count[row, :, first + self.sink : max(0, ctx.end - self.tokens)] = -torch.inf
        return read_all(p, q, log_count)

    def _attend_in_order(self, p: LayerPass, q: Tensor) -> Tensor:
        """Attention of several tokens of a token model, one after the other."""
        out = [self.attend(p.token(i), q[:, :, i : i + 1]) for i in range(p.ctx.tokens)]
        return torch.cat(out, 2)
