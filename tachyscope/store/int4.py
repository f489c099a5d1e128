"""Store past keys and values as 4-bit whole numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from tachyscope.store import Codec, StorePolicy
from tachyscope.store.codec import Int4Codes
from tachyscope.types import Shape


@final
@dataclass(frozen=True)
class Int4(StorePolicy):
    """Past keys and values as numbers from -7 to 7, with a scale for every 32 channels."""

    paper: ClassVar[str] = "after FlexGen, arXiv 2303.06865, and KIVI, arXiv 2402.02750"

    def codecs(self, shape: Shape) -> dict[str, Codec]:
        return dict.fromkeys(("k", "v", "unrotated"), Int4Codes())
