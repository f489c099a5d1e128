"""Read everything: the baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import Tensor

from tachyscope.attention import (
    NEWEST,
    PAST_WEIGHT,
    WEIGHT_NEWEST,
    WEIGHTS,
    AttentionPolicy,
    TextPolicy,
    attend,
    between,
)
from tachyscope.core.limits import LATENTS
from tachyscope.core.policy import setting
from tachyscope.core.types import PassContext, Shape, Text
from tachyscope.core.work import Work
from tachyscope.kernels.attention import attention
from tachyscope.store import LayerPass


@final
@dataclass(frozen=True)
class Dense(AttentionPolicy, name="dense"):
    """Read every entry in use: the baseline, and the oracle of every other policy."""

    splits_heads: ClassVar[bool] = True

    past_weight: float | None = setting(None, PAST_WEIGHT, bound=WEIGHTS)
    newest: int | None = setting(None, WEIGHT_NEWEST, bound=LATENTS)

    def weighed(self, ctx: PassContext) -> slice:
        newest = NEWEST if self.newest is None else self.newest
        return between(ctx.shape, ctx.prompt, ctx.past, 1, newest)

    def attend(self, p: LayerPass, q: Tensor) -> Tensor:
        first, rest = p.ctx.hidden_slots
        p.work.add_reads(q, p.ctx.end - (rest - first))
        return read_all(p, q, self.log_weights(p) if self.weighs(p.ctx) else None)


def read_all(p: LayerPass, q: Tensor, log_count: Tensor | None = None) -> Tensor:
    """Attention over the past and the present chunk; it copies them if `hidden_slots` split them.

    `log_count` is the layer's own by default.
    """
    layer, ctx = p.layer, p.ctx
    first, rest = ctx.hidden_slots
    if log_count is None and not ctx.plain:
        log_count = layer.log_count
    runs = [slice(0, ctx.end)] if first == rest else [slice(0, first), slice(rest, ctx.end)]
    k, v, weights = layer.read(ctx, *runs[first == 0 < rest :], log_count=log_count)
    return attend(ctx.shape, q, k, v, weights, ctx.shape.token_by_token)


@final
@dataclass(frozen=True)
class DenseText(TextPolicy, name="dense"):
    """Read every prompt token, padding included, as the models' authors do."""

    splits_heads: ClassVar[bool] = True
    query_by_query: ClassVar[bool] = True

    def check_plan(self, plan: Mapping[str, Any], shape: Shape) -> None:
        return  # a model without a prompt reads none

    def prepare(self, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Text:
        return Text(k, v)

    def attend(self, q: Tensor, text: Text, work: Work) -> Tensor:
        work.add_text_reads(q, text.k.shape[2])
        return attention(q, text.k, text.v, text.log_count)
