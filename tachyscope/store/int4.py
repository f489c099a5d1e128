"""Store past keys and values as 4-bit integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from tachyscope.core.types import Shape
from tachyscope.store import Codec, StorePolicy
from tachyscope.store.codec import Packed, group_of

GROUP = 128  # the most entries that share a step and a zero


@final
@dataclass(frozen=True)
class Int4(StorePolicy, name="int4"):
    """Quantise past keys and values by channel over a latent frame's entries, to 16 levels.

    Where the cache or the index separates a frame's entries, each is coded alone, which loses more.
    """

    paper: ClassVar[str] = "after KIVI, arXiv 2402.02750, and arXiv 2605.26266"
    splits_heads: ClassVar[bool] = True

    def codecs(self, shape: Shape, whole_frames: bool) -> dict[str, Codec]:
        group = group_of(shape, GROUP) if whole_frames else 1
        return dict.fromkeys(("k", "v", "unrotated"), Packed(4, group))
