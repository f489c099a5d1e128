"""How to store what is remembered: as the model computes it, or as codes of a byte a channel."""

from __future__ import annotations

import abc
from typing import ClassVar

import torch

from tachyscope.store.kv import KVStore, PerSlot, Tensors

__all__ = ["KVStore", "PerSlot", "StorePolicy", "Tensors"]


class StorePolicy(abc.ABC):
    """Says what a channel of a past key or value is stored as; the present chunk is native."""

    paper: ClassVar[str]

    @property
    @abc.abstractmethod
    def codes(self) -> torch.dtype | None:
        """A code of `kernels/codes.py`, or None for the model's own dtype."""
