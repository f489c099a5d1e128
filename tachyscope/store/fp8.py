"""Store past keys and values as 8-bit floating-point numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch

from tachyscope.core.types import Shape
from tachyscope.store import Codec, StorePolicy
from tachyscope.store.codec import Bytes


@final
@dataclass(frozen=True)
class Fp8(StorePolicy, name="fp8"):
    """Quantise past keys and values to float8 (e4m3), with a scale for every entry and head.

    In a bank a scale serves a block, keys are coded less the mean of the first ones, and attention
    multiplies the codes in float8 without decoding them.
    """

    paper: ClassVar[str] = "after FlashAttention-3, arXiv 2407.08608"
    for_banks: ClassVar[bool] = True
    splits_heads: ClassVar[bool] = True

    def codecs(self, shape: Shape, whole_frames: bool) -> dict[str, Codec]:
        return dict.fromkeys(("k", "v", "unrotated"), Bytes(torch.uint8))
