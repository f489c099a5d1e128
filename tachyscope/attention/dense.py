"""Read everything: the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from tachyscope.attention import AttentionPolicy, TextPolicy, count
from tachyscope.kernels.attention import attention
from tachyscope.meter import Meter
from tachyscope.types import LayerCache, PassContext, Text


@final
@dataclass(frozen=True)
class Dense(AttentionPolicy):
    """Read every entry in use: the baseline, and the oracle of every other policy."""

    paper: ClassVar[str] = ""

    def attend(self, q: Tensor, layer: LayerCache, ctx: PassContext, meter: Meter) -> Tensor:
        first, rest = ctx.hidden_slots
        count(meter, "pairs", q, ctx.end - (rest - first))
        return read_all(q, layer, ctx)


def read_all(q: Tensor, layer: LayerCache, ctx: PassContext) -> Tensor:
    """Attention over past and now: what is seen is one run of slots, so nothing is copied.

    Only where slots in the middle are left out, the runs beside them are put together.
    """
    first, rest = ctx.hidden_slots

    def seen(x: Tensor) -> Tensor:
        if first == rest:
            return x[:, :, : ctx.end]
        run = x[:, :, rest : ctx.end]
        return run if first == 0 else torch.cat([x[:, :, :first], run], 2)

    log_count = None if ctx.plain else seen(layer.log_count)
    return attention(q, seen(layer.k), seen(layer.v), log_count, causal=ctx.shape.token_by_token)


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
