"""What is kept: policies that keep a layer's KV cache within a budget."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.policy import Policy
from tachyscope.core.types import Shape, Size
from tachyscope.store import KVStore, LayerPass, Tensors
from tachyscope.store.bank_layout import BankLayout
from tachyscope.store.frame_bank import FrameLayout
from tachyscope.store.kv import Rotate

__all__ = [
    "CachePolicy",
    "checked_capacity",
    "set_times",
]


class CachePolicy(Policy, question="cache"):
    """Decides which past a layer keeps; it changes nothing but the layer that it is given."""

    appends: ClassVar[bool] = False  # whether a commit leaves every earlier entry unchanged
    wants_poses: ClassVar[bool] = False  # whether `before_chunk` needs the camera's poses
    dense_only: ClassVar[bool] = False  # whether attention must read the past without an index
    whole_frames: ClassVar[bool] = False  # whether entries are moved by whole latent frames only
    traceable: ClassVar[bool] = True  # whether `pos` identifies an entry
    stores_codes: ClassVar[bool] = True  # whether the plan's store policy codes the past
    bounded_by: ClassVar[str] = "budget"  # the setting that bounds a layer's device memory
    streams: ClassVar[int] = 1  # CUDA streams that the layers' commits are spread over
    host: str | None = None  # dtype of a channel in host memory; None: as on the device

    def check_plan(self, plan: Mapping[str, Any], shape: Shape) -> None:
        if (self.view_depends_on_pass or self.dense_only) and plan["attention"].name != "dense":
            then = ", or leave view out" if getattr(self, "view", None) is not None else ""
            raise TachyscopeError(
                f"cache={self} says itself what a pass reads, got "
                f"attention={plan['attention']}: use attention=dense{then}"
            )

    @property
    def merges(self) -> bool:
        """Whether log-weights may differ from 0: of merged entries and of empty slots."""
        return False

    @property
    def wants_queries(self) -> bool:
        """Whether a commit reads the chunk's rotated queries, in own "queries" [B, H, S, D]."""
        return False

    @property
    def view_depends_on_pass(self) -> bool:
        """Whether the visible past, or its positions, differ from pass to pass."""
        return False

    @property
    def grows(self) -> bool:
        """Whether the past is unbounded, so that tensors grow between chunks."""
        return False

    @property
    def keeps_unrotated(self) -> bool:
        """Whether unrotated keys are kept beside the rotated ones."""
        return False

    def cache_heads(self, shape: Shape) -> int:
        """1 if all heads keep the same entries, else the number of key/value heads."""
        return 1

    @abc.abstractmethod
    def capacity(self, shape: Shape, prompt: int, frames: int | None) -> int:
        """Slots of a layer, the present chunk's included; raises if a budget is too small."""

    def tensors(self, shape: Shape, slots: int, device: torch.device) -> Tensors:
        """The policy's tensors of a layer, own "cache"."""
        return {}

    @abc.abstractmethod
    def commit(self, p: LayerPass, n: int) -> int:
        """Append the first n entries of the present chunk to the past, within budget; returns the
        past's entries.

        `p.on_merge` is called with entries that were merged, by their slots before.
        """

    def past_in_pass(self, shape: Shape, past: int, tokens: int) -> int:
        """Entries of the past that `compress` leaves in a chunk's first pass."""
        return past

    def compress(self, p: LayerPass, q: Tensor, past: int) -> None:
        """Reduce the past to `past` entries in a chunk's first pass, whose entries are behind it.

        Called with the rotated queries q [B, H, S, D] if `past_in_pass` returns fewer entries.
        """

    def is_full(self, shape: Shape, past: int, room: int, total: int) -> bool:
        """Whether every chunk launches the same work from here on, after `total` entries."""
        return past == room

    def bank_layout(
        self, plan: Mapping[str, Any], shape: Shape, slots: int, latent_frames: int | None
    ) -> BankLayout | FrameLayout | None:
        """How a bank divides a layer's slots; None without a bank, raises if they are too few."""
        return None

    def before_chunk(self, p: LayerPass, poses: Tensor) -> None:
        """Called before a chunk with its camera's poses [B, F, 3, 4], if `wants_poses`."""

    def hidden_slots(self, p: LayerPass) -> tuple[int, int]:
        """Called before a pass, if `view_depends_on_pass`: move entries to where it reads them.

        Returns the start and end of the past's slots that the pass does not read.
        """
        return 0, 0


def checked_capacity(
    policy: str, budget: Size, shape: Shape, prompt: int, sink: int, newest: int
) -> int:
    """Slots of a bounded cache; raises if the budget is less than the protected entries."""
    slots, now = budget.entries(shape), shape.chunk + shape.rolling_frames
    frames = sink + newest + now
    floor = prompt + frames * shape.tokens_per_frame
    if slots < floor:
        need = f"{-(-floor // shape.tokens_per_frame)}f"
        raise TachyscopeError(
            f"cache policy {policy!r}: budget={budget} holds {slots} entries, but {floor} are "
            f"protected (prompt {prompt}, sink {sink}f, newest {newest}f, present chunk "
            f"{now}f): raise budget to {need} or more, or lower sink or newest"
        )
    return slots


def set_times(
    layer: KVStore, slots: slice, time: Tensor, tokens_per_frame: int, rotate: Rotate
) -> None:
    """Move entries to latent frames from `time` [B, Hkv or 1, 1] on, and rotate their keys."""
    index = torch.arange(slots.stop - slots.start, device=time.device) // tokens_per_frame
    layer.pos[:, :, slots, 0] = time + index
    layer.rotate(slots, rotate)
