"""Keep everything: the dense baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from tachyscope.cache import CachePolicy, Rotate
from tachyscope.meter import Meter
from tachyscope.types import Layer, Moment, Shape


@final
@dataclass(frozen=True)
class KeepAll(CachePolicy):
    """Keep every entry: the dense baseline, and the oracle of every other policy."""

    paper: ClassVar[str] = ""
    appends: ClassVar[bool] = True
    grows: ClassVar[bool] = True
    raw: ClassVar[bool] = False

    def groups(self, shape: Shape) -> int:
        return 1

    def capacity(self, shape: Shape, prompt: int, frames: int | None) -> int:
        return prompt + (frames or 8 * shape.chunk) * shape.places

    def tensors(self, shape: Shape, slots: int, device: torch.device) -> dict[str, Tensor]:
        return {}

    def commit(self, layer: Layer, at: Moment, n: int, rotate: Rotate, meter: Meter) -> int:
        return at.past + n
