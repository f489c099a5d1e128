"""Keep everything: the dense baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from tachyscope.cache import CachePolicy
from tachyscope.core.types import Shape
from tachyscope.store import LayerPass


@final
@dataclass(frozen=True)
class KeepAll(CachePolicy, name="keep_all"):
    """Keep every entry: the dense baseline, and the oracle of every other policy."""

    appends: ClassVar[bool] = True
    splits_heads: ClassVar[bool] = True
    whole_frames: ClassVar[bool] = True
    grows: ClassVar[bool] = True

    def capacity(self, shape: Shape, prompt: int, frames: int | None) -> int:
        return prompt + (frames or 8 * shape.chunk) * shape.tokens_per_frame

    def commit(self, p: LayerPass, n: int) -> int:
        return p.ctx.past + n
