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
from tachyscope.types import Layer, Moment, Shape


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
    sink: int = setting(4, "First entries that every query reads, a prompt's padding left out.")

    paper: ClassVar[str] = "StreamingLLM, arXiv 2309.17453, as in FastCar, arXiv 2505.14709"

    def __post_init__(self) -> None:
        check_settings(self, "attention", "window")

    def check(self, shape: Shape, prompt: int, slots: int | None) -> None:
        pass

    def tensors(self, shape: Shape, slots: int, device: torch.device) -> dict[str, Tensor]:
        return {}

    def index(self, layer: Layer, at: Moment, past: int, meter: Meter, kept: int = 0) -> None:
        pass

    def attend(self, q: Tensor, layer: Layer, at: Moment, meter: Meter) -> Tensor:
        near = self.tokens if at.shape.causal else self.tokens + at.tokens
        pads = at.pads or (0,) * q.shape[0]
        if at.end <= self.sink + max(pads) + near:
            count(meter, "pairs", q, at.end)
            return read_all(q, layer, at)
        if at.shape.causal and at.tokens > 1:
            return self._attend_in_order(q, layer, at, meter)
        count(meter, "pairs", q, self.sink + near)
        return self._attend(q, layer, at, pads, at.end - near, at.end)

    def _attend(
        self, q: Tensor, layer: Layer, at: Moment, pads: tuple[int, ...], start: int, end: int
    ) -> Tensor:
        def read(x: Tensor) -> Tensor:
            if len(set(pads)) == 1:
                first = x[:, :, pads[0] : pads[0] + self.sink]
            else:
                first = torch.cat([x[b : b + 1, :, p : p + self.sink] for b, p in enumerate(pads)])
            return torch.cat([first, x[:, :, start:end]], 2)

        logw = None if at.plain else read(layer.logw)
        return attention(q, read(layer.k), read(layer.v), logw)

    def _attend_in_order(self, q: Tensor, layer: Layer, at: Moment, meter: Meter) -> Tensor:
        """A pass of several tokens of a token model: each reads as if it came alone."""
        out = [self.attend(q[:, :, i : i + 1], layer, at.token(i), meter) for i in range(at.tokens)]
        return torch.cat(out, 2)
