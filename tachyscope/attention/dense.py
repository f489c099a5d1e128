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
from tachyscope.types import Layer, Moment, Shape, Text


@final
@dataclass(frozen=True)
class Dense(AttentionPolicy):
    """Read every entry in use: the baseline, and the oracle of every other policy."""

    paper: ClassVar[str] = ""

    def check(self, shape: Shape, prompt: int, slots: int | None) -> None:
        pass

    def tensors(self, shape: Shape, slots: int, device: torch.device) -> dict[str, Tensor]:
        return {}

    def index(self, layer: Layer, at: Moment, past: int, meter: Meter, kept: int = 0) -> None:
        pass

    def attend(self, q: Tensor, layer: Layer, at: Moment, meter: Meter) -> Tensor:
        first, rest = at.unread
        count(meter, "pairs", q, at.end - (rest - first))
        return read_all(q, layer, at)


def read_all(q: Tensor, layer: Layer, at: Moment) -> Tensor:
    """Attention over past and now: what is seen is one run of slots, so nothing is copied.

    Only where slots in the middle are left out, the runs beside them are put together.
    """
    first, rest = at.unread

    def seen(x: Tensor) -> Tensor:
        if first == rest:
            return x[:, :, : at.end]
        run = x[:, :, rest : at.end]
        return run if first == 0 else torch.cat([x[:, :, :first], run], 2)

    logw = None if at.plain else seen(layer.logw)
    return attention(q, seen(layer.k), seen(layer.v), logw, causal=at.shape.causal)


@final
@dataclass(frozen=True)
class DenseText(TextPolicy):
    """Read every prompt token, padding included, as the models' authors do."""

    paper: ClassVar[str] = ""

    def prepare(self, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Text:
        return Text(k, v)

    def attend(self, q: Tensor, text: Text, meter: Meter) -> Tensor:
        count(meter, "text_pairs", q, text.k.shape[2])
        return attention(q, text.k, text.v, text.logw)
