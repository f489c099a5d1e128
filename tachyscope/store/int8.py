"""Store past keys and values as 8-bit integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch

from tachyscope.core.types import Shape
from tachyscope.store import Codec, StorePolicy
from tachyscope.store.codec import Bytes


@final
@dataclass(frozen=True)
class Int8(StorePolicy, name="int8"):
    """Quantise past keys and values to int8, with a scale for every entry and head."""

    paper: ClassVar[str] = "after KIVI, arXiv 2402.02750, and SageAttention, arXiv 2410.02367"
    splits_heads: ClassVar[bool] = True

    def codecs(self, shape: Shape, whole_frames: bool) -> dict[str, Codec]:
        return dict.fromkeys(("k", "v", "unrotated"), Bytes(torch.int8))
