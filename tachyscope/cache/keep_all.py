"""Keep everything: the dense baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from tachyscope.cache import CachePolicy, OnMerge, Rotate
from tachyscope.meter import Meter
from tachyscope.store import KVStore
from tachyscope.types import PassContext, Shape


@final
@dataclass(frozen=True)
class KeepAll(CachePolicy):
    """Keep every entry: the dense baseline, and the oracle of every other policy."""

    paper: ClassVar[str] = ""
    appends: ClassVar[bool] = True
    whole_frames: ClassVar[bool] = True
    grows: ClassVar[bool] = True

    def capacity(self, shape: Shape, prompt: int, frames: int | None) -> int:
        return prompt + (frames or 8 * shape.chunk) * shape.tokens_per_frame

    def commit(
        self,
        layer: KVStore,
        ctx: PassContext,
        n: int,
        rotate: Rotate,
        meter: Meter,
        on_merge: OnMerge | None = None,
    ) -> int:
        return ctx.past + n
