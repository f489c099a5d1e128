"""Store past keys and values as 2-bit whole numbers (KIVI)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from tachyscope.errors import TachyscopeError
from tachyscope.store import Codec, StorePolicy
from tachyscope.store.codec import Int2Codes
from tachyscope.types import Shape

GROUP = 32  # entries, or channels, that share a step and a zero


@final
@dataclass(frozen=True)
class Int2(StorePolicy):
    """Past keys channel by channel in groups of 32 entries, values entry by entry, 4 levels each.

    A group's entries stay together: it needs a cache that moves whole latent frames.
    """

    paper: ClassVar[str] = "KIVI, arXiv 2402.02750"
    whole_frames: ClassVar[bool] = True

    def codecs(self, shape: Shape) -> dict[str, Codec]:
        tokens = shape.tokens_per_frame
        group = max(n for n in range(1, GROUP + 1) if tokens % n == 0)
        if shape.token_by_token or group == 1 or shape.head_dim % 4:
            raise TachyscopeError(
                f"store policy 'int2' codes keys by groups of entries of a latent frame, got "
                f"{tokens} entries a frame of {shape.head_dim} channels, or a model that writes "
                f"token by token: use store=int4"
            )
        keys = Int2Codes(group)
        return {"k": keys, "v": Int2Codes(), "unrotated": keys}
