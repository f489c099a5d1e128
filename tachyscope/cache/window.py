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
    is the same as counting positions inside the window: a query meets only differences. With
    `fold`, frames that leave are folded into the sink, place by place: sink · fold + frame ·
    (1 - fold).
    """

    budget: Size = Size(21, True)
    sink: int = 1
    positions: Literal["absolute", "reindexed"] = "absolute"
    fold: float | None = None

    paper: ClassVar[str] = "StreamingLLM, arXiv 2309.17453"
    weighted: ClassVar[bool] = False
    grows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.sink < 0:
            raise TachyscopeError(f"cache policy 'window': sink must be 0 or more, got {self.sink}")
        if self.fold is not None and not (0 <= self.fold <= 1 and self.sink and self.raw):
            raise TachyscopeError(
                f"cache policy 'window': fold is from 0 to 1, and needs a sink and "
                f"positions=reindexed, got fold={self.fold},sink={self.sink},"
                f"positions={self.positions}: set these"
            )

    @property
    def raw(self) -> bool:
        return self.positions == "reindexed"

    def groups(self, shape: Shape) -> int:
        return 1

    def capacity(self, shape: Shape, prompt: int, frames: int | None) -> int:
        slots = held("window", self.budget, shape, prompt, self.sink, 0)
        # so that what leaves always covers the sink a whole number of times
        if self.fold is not None and (
            shape.chunk % self.sink or (slots - prompt) % shape.chunk_tokens
        ):
            raise TachyscopeError(
                f"cache policy 'window': fold needs a sink that divides the chunk of "
                f"{shape.chunk}f, and a budget of whole chunks, got sink={self.sink}f, "
                f"budget={self.budget}: change these"
            )
        return slots

    def tensors(self, shape: Shape, slots: int, device: torch.device) -> dict[str, Tensor]:
        return {}

    def commit(self, layer: Layer, at: Moment, n: int, rotate: Rotate, meter: Meter) -> int:
        total = at.past + n
        keep = self.budget.entries(at.shape) - at.shape.chunk_tokens
        if total <= keep:
            return total
        first = at.prompt + self.sink * at.shape.places
        if self.fold is not None:
            self._fold_into_sink(layer, at.prompt, first, first + total - keep)
        move(layer, first + total - keep, first, keep - first)
        if layer.raw is not None:
            # in whole frames; with nothing kept behind the sink, the frame that comes next
            behind = (keep - first - 1) // at.shape.places
            oldest = layer.pos[:, :, total - 1 : total, 0] - behind
            self._bring_sink(layer, at, first, oldest, rotate)
        return keep

    def _fold_into_sink(self, layer: Layer, start: int, first: int, end: int) -> None:
        """Entries from `first` to `end` leave; the sink stands from `start` to `first`."""
        assert layer.raw is not None and self.fold is not None
        for x in (layer.raw, layer.v):
            sink = x[:, :, start:first]
            for leaving in x[:, :, first:end].split(first - start, 2):
                sink.lerp_(leaving, 1 - self.fold)

    def _bring_sink(
        self, layer: Layer, at: Moment, first: int, oldest: Tensor, rotate: Rotate
    ) -> None:
        """Let the sink stand right before the frame `oldest`."""
        sink = slice(at.prompt, first)
        index = torch.arange(first - at.prompt, device=oldest.device) // at.shape.places
        layer.pos[:, :, sink, 0] = oldest - self.sink + index
        assert layer.raw is not None
        layer.k[:, :, sink] = rotate(layer.raw[:, :, sink], layer.pos[:, :, sink])
