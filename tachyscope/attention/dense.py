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

    def index(self, layer: Layer, at: Moment, past: int, meter: Meter) -> None:
        pass

    def attend(self, q: Tensor, layer: Layer, at: Moment, meter: Meter) -> Tensor:
        count(meter, "pairs", q, at.end)
        return read_all(q, layer, at)


def read_all(q: Tensor, layer: Layer, at: Moment) -> Tensor:
    """Attention over past and now: the slots in use are a prefix, so nothing is copied."""
    used = slice(0, at.end)
    logw = None if at.plain else layer.logw[:, :, used]
    return attention(q, layer.k[:, :, used], layer.v[:, :, used], logw, causal=at.shape.causal)


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
