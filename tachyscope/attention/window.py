"""Read the first entries and the newest (StreamingLLM), whatever the cache holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from tachyscope.attention import AttentionPolicy, count
from tachyscope.attention.dense import read_all
from tachyscope.kernels.attention import attention
from tachyscope.meter import Meter
from tachyscope.settings import check_settings, setting
from tachyscope.store import KVStore
from tachyscope.types import PassContext


@final
@dataclass(frozen=True)
class Window(AttentionPolicy):
    """Read the first `sink` live entries, and the newest `tokens` with the present ones.

    In token models a query is one of its own `tokens`; a chunk's tokens all read each other and
    `tokens` of the past. It is the sparse attention that FastCar is combined with.
    """

    tokens: int = setting(
        16, "Newest entries that a query reads: in token models its own counts, else past ones."
    )
    sink: int = setting(
        4,
        "First entries that every query reads, a prompt's padding left out. In token models they "
        "are the prompt's: fewer than it has hide the rest of it.",
    )

    paper: ClassVar[str] = "StreamingLLM, arXiv 2309.17453, as in FastCar, arXiv 2505.14709"

    def __post_init__(self) -> None:
        check_settings(self, "attention", "window")

    def attend(self, q: Tensor, layer: KVStore, ctx: PassContext, meter: Meter) -> Tensor:
        near = self.tokens if ctx.shape.token_by_token else self.tokens + ctx.tokens
        pads = ctx.left_padding or (0,) * q.shape[0]
        if ctx.end <= self.sink + max(pads) + near:
            count(meter, "pairs", q, ctx.end)
            return read_all(q, layer, ctx)
        if ctx.shape.token_by_token and ctx.tokens > 1:
            return self._attend_in_order(q, layer, ctx, meter)
        count(meter, "pairs", q, self.sink + near)
        sinks = [slice(p, p + self.sink) for p in pads]
        first = sinks[0] if len(set(pads)) == 1 else sinks
        log_count = None if ctx.plain else layer.log_count
        return attention(
            q, *layer.read(ctx, first, slice(ctx.end - near, ctx.end), log_count=log_count)
        )

    def _attend_in_order(self, q: Tensor, layer: KVStore, ctx: PassContext, meter: Meter) -> Tensor:
        """A pass of several tokens of a token model: each reads as if it came alone."""
        out = [
            self.attend(q[:, :, i : i + 1], layer, ctx.token(i), meter) for i in range(ctx.tokens)
        ]
        return torch.cat(out, 2)
