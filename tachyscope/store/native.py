"""Store keys and values as the model computes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from tachyscope.core.types import Shape
from tachyscope.store import Codec, StorePolicy


@final
@dataclass(frozen=True)
class Native(StorePolicy, name="native"):
    """Keys and values in the model's own dtype: the baseline."""

    splits_heads: ClassVar[bool] = True

    def codecs(self, shape: Shape, whole_frames: bool) -> dict[str, Codec]:
        return {}
