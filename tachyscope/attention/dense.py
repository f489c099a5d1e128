"""Read everything: the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from tachyscope.attention import AttentionPolicy, TextPolicy, count
from tachyscope.kernels.attention import attention
from tachyscope.meter import Meter
from tachyscope.store import KVStore
from tachyscope.types import PassContext, Text


@final
@dataclass(frozen=True)
class Dense(AttentionPolicy):
    """Read every entry in use: the baseline, and the oracle of every other policy."""

    paper: ClassVar[str] = ""

    def attend(self, q: Tensor, layer: KVStore, ctx: PassContext, meter: Meter) -> Tensor:
        first, rest = ctx.hidden_slots
        count(meter, "pairs", q, ctx.end - (rest - first))
        return read_all(q, layer, ctx)


def read_all(
    q: Tensor, layer: KVStore, ctx: PassContext, log_count: Tensor | None = None
) -> Tensor:
    """Attention over past and now: what is seen is one run of slots, so nothing is copied.

    Only where slots in the middle are left out, the runs beside them are put together. `log_count`
    is the layer's own, unless given.
    """
    first, rest = ctx.hidden_slots
    if log_count is None and not ctx.plain:
        log_count = layer.log_count
    runs = [slice(0, ctx.end)] if first == rest else [slice(0, first), slice(rest, ctx.end)]
    k, v, weights = layer.read(ctx, *runs[first == 0 < rest :], log_count=log_count)
    return attention(q, k, v, weights, ctx.shape.token_by_token)


@final
@dataclass(frozen=True)
class DenseText(TextPolicy):
    """Read every prompt token, padding included, as the models' authors do."""

    paper: ClassVar[str] = ""

    def prepare(self, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Text:
        return Text(k, v)

    def attend(self, q: Tensor, text: Text, meter: Meter) -> Tensor:
        count(meter, "text_pairs", q, text.k.shape[2])
        return attention(q, text.k, text.v, text.log_count)
