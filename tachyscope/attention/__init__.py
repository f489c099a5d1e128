"""What to read: policies for the video's own entries and for the prompt's."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from tachyscope.meter import Meter
from tachyscope.store import KVStore, Tensors
from tachyscope.types import PassContext, Shape, Text


class AttentionPolicy(abc.ABC):
    """Decides which entries a query reads.

    It changes its own tensors of a layer and, between commits, how the past's entries are ordered.
    """

    paper: ClassVar[str]
    indexes: ClassVar[bool] = False  # whether it keeps anything of the past
    reorders: ClassVar[bool] = False  # whether it puts the past's entries in another order

    def check(self, shape: Shape, prompt: int, slots: int | None) -> None:
        """Raise where the policy cannot serve this shape; `slots` is a bounded cache's size."""
        return

    def tensors(self, shape: Shape, slots: int, device: torch.device) -> Tensors:
        """Fixed tensors to keep beside a layer of that many slots, its own "attention" ones."""
        return {}

    def build_index(
        self, layer: KVStore, ctx: PassContext, past: int, meter: Meter, kept: int = 0
    ) -> None:
        """The past has changed and now holds `past` entries: bring the tensors up to date.

        Keys and values of the past may be put in another order, until `restore_order` is called.
        The first `kept` entries are as the last index left them, and stay so.
        """
        return

    def restore_order(self, layer: KVStore, ctx: PassContext, past: int) -> None:
        """The past is about to change: put its keys and values back in the cache's order."""
        return

    def grow(self, own: dict[str, Tensor], larger: Mapping[str, Tensor], kept: int) -> None:
        """Take over tensors for more slots, with the index of the first `kept` entries."""
        own.update(larger)

    def to_index_order(self, x: Tensor, layer: KVStore, ctx: PassContext) -> Tensor:
        """x [B, Hkv, N, D], one row a slot of the cache, as keys and values stand now."""
        return x

    def log_weights(self, layer: KVStore, ctx: PassContext) -> Tensor:
        """Log-weights [B, Hkv or 1, end] of past and now, in the order of keys and values."""
        return layer.log_count[:, :, : ctx.end]

    def first_sparse_pass(self, ctx: PassContext) -> int:
        """The first pass over a chunk that may leave entries out; those before it read all."""
        return 0

    @abc.abstractmethod
    def attend(self, q: Tensor, layer: KVStore, ctx: PassContext, meter: Meter) -> Tensor:
        """Attention of rotated queries q [B, H, S, D] over past and now."""


class TextPolicy(abc.ABC):
    """Decides which prompt tokens cross-attention reads."""

    paper: ClassVar[str]

    @abc.abstractmethod
    def prepare(self, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Text:
        """Once a prompt: k, v [B, H, L, D] whose rows are padding from their true length on."""

    @abc.abstractmethod
    def attend(self, q: Tensor, text: Text, meter: Meter) -> Tensor:
        """Attention of q [B, H, S, D] over the prepared prompt."""


def count(meter: Meter, name: str, q: Tensor, entries: int) -> None:
    """Add the pairs that q [B, H, S, D] scores against so many entries, and their work."""
    pairs = q.shape[0] * q.shape[1] * q.shape[2] * entries
    meter.add(name, pairs)
    meter.add("macs", 2 * pairs * q.shape[3])
