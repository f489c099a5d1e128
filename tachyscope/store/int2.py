"""Store past keys and values as 2-bit integers (KIVI)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.types import Shape
from tachyscope.store import Codec, StorePolicy
from tachyscope.store.codec import Packed, group_of

GROUP = 32  # entries, or channels, that share a step and a zero


@final
@dataclass(frozen=True)
class Int2(StorePolicy, name="int2"):
    """Quantise past keys by channel in groups of 32 entries, and values by entry, to 4 levels.

    A group's entries stay together, so the cache must move whole latent frames.
    """

    paper: ClassVar[str] = "KIVI, arXiv 2402.02750"
    splits_heads: ClassVar[bool] = True
    whole_frames: ClassVar[bool] = True

    def codecs(self, shape: Shape, whole_frames: bool) -> dict[str, Codec]:
        tokens = shape.tokens_per_frame
        group = group_of(shape, GROUP)
        if not whole_frames or group == 1 or shape.head_dim % 4:
            raise TachyscopeError(
                f"store policy 'int2' codes keys by groups of entries of a latent frame, got "
                f"{tokens} entries a frame of {shape.head_dim} channels, or a model that writes "
                f"token by token: use store=int4"
            )
        keys = Packed(2, group)
        return {"k": keys, "v": Packed(2), "unrotated": keys}
