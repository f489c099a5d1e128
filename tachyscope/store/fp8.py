"""Store past keys and values as 8-bit floating-point numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch

from tachyscope.store import Codec, StorePolicy
from tachyscope.store.codec import Bytes
from tachyscope.types import Shape


@final
@dataclass(frozen=True)
class Fp8(StorePolicy):
    """Past keys and values as float8 (e4m3), with a scale for every entry and head."""

    paper: ClassVar[str] = "after FlashAttention-3, arXiv 2407.08608"

    def codecs(self, shape: Shape) -> dict[str, Codec]:
        return dict.fromkeys(("k", "v", "unrotated"), Bytes(torch.uint8))
