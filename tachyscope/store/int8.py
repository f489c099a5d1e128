"""Store past keys and values as 8-bit whole numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch

from tachyscope.store import Codec, StorePolicy
from tachyscope.store.codec import Bytes
from tachyscope.types import Shape


@final
@dataclass(frozen=True)
class Int8(StorePolicy):
    """Past keys and values as int8, with a scale for every entry and head."""

    paper: ClassVar[str] = "after KIVI, arXiv 2402.02750, and SageAttention, arXiv 2410.02367"

    def codecs(self, shape: Shape) -> dict[str, Codec]:
        return dict.fromkeys(("k", "v", "unrotated"), Bytes(torch.int8))
