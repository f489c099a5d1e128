"""How to store what is remembered: as the model computes it, or as codes of 8, 4 or 2 bits."""

from __future__ import annotations

import abc
from typing import ClassVar

from tachyscope.store.codec import Codec
from tachyscope.store.kv import KVStore, PerSlot, Tensors
from tachyscope.types import Shape

__all__ = ["Codec", "KVStore", "PerSlot", "StorePolicy", "Tensors"]


class StorePolicy(abc.ABC):
    """Says how a past key or value is stored; the present chunk is as the model computes it."""

    paper: ClassVar[str]
    whole_frames: ClassVar[bool] = False  # whether entries can be moved by latent frames alone

    @abc.abstractmethod
    def codecs(self, shape: Shape) -> dict[str, Codec]:
        """By name, of k, v and unrotated; none where they are in the model's own dtype."""
