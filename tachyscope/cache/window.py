"""Keep the first latent frames and the newest (StreamingLLM)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from tachyscope.cache import CachePolicy, Rotate, held, move
from tachyscope.errors import TachyscopeError
from tachyscope.meter import Meter
from tachyscope.types import Layer, Moment, Shape, Size


@final
@dataclass(frozen=True)
class Window(CachePolicy):
    """Keep `sink` first latent frames and the newest ones that fit the budget.

    With positions "reindexed" the sink moves along, so as to stand right before the window. That
    is the same as counting positions inside the window: a query meets only differences.
    """

    budget: Size = Size(21, True)
    sink: int = 1
    positions: Literal["absolute", "reindexed"] = "absolute"

    paper: ClassVar[str] = "StreamingLLM, arXiv 2309.17453"
    weighted: ClassVar[bool] = False
    grows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.sink < 0:
            raise TachyscopeError(f"cache policy 'window': sink must be 0 or more, got {self.sink}")

    @property
    def raw(self) -> bool:
        return self.positions == "reindexed"

    def groups(self, shape: Shape) -> int:
        return 1

    def capacity(self, shape: Shape, prompt: int, frames: int | None) -> int:
        return held("window", self.budget, shape, prompt, self.sink, 0)

    def tensors(self, shape: Shape, slots: int, device: torch.device) -> dict[str, Tensor]:
        return {}

    def commit(self, layer: Layer, at: Moment, n: int, rotate: Rotate, meter: Meter) -> int:
        total = at.past + n
        keep = self.budget.entries(at.shape) - at.shape.chunk_tokens
        if total <= keep:
            return total
        first = at.prompt + self.sink * at.shape.places
        move(layer, first + total - keep, first, keep - first)
        if layer.raw is not None and keep > first:
            self._bring_sink(layer, at, first, rotate)
        return keep

    def _bring_sink(self, layer: Layer, at: Moment, first: int, rotate: Rotate) -> None:
        sink = slice(at.prompt, first)
        oldest = layer.pos[:, :, first : first + 1, 0]
        index = torch.arange(first - at.prompt, device=oldest.device) // at.shape.places
        layer.pos[:, :, sink, 0] = oldest - self.sink + index
        assert layer.raw is not None
        layer.k[:, :, sink] = rotate(layer.raw[:, :, sink], layer.pos[:, :, sink])
