"""Store keys and values as the model computes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from tachyscope.store import Codec, StorePolicy
from tachyscope.types import Shape


@final
@dataclass(frozen=True)
class Native(StorePolicy):
    """Keys and values in the model's own dtype: the baseline."""

    paper: ClassVar[str] = ""

    def codecs(self, shape: Shape) -> dict[str, Codec]:
        return {}
