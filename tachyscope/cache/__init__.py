"""What to remember: policies that bring a layer's past within a budget."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from tachyscope.errors import TachyscopeError
from tachyscope.meter import Meter
from tachyscope.store import KVStore, Tensors
from tachyscope.store.kv import Rotate
from tachyscope.types import PassContext, Shape, Size

__all__ = [
    "CachePolicy",
    "OnMerge",
    "Rotate",
    "check_whole_frames",
    "checked_capacity",
    "clamp_distance",
    "stand_at",
]

# told that slots `source` joined slots `root`, both [B, Hkv or 1, e]
OnMerge = Callable[[PassContext, Tensor, Tensor], None]


class CachePolicy(abc.ABC):
    """Decides which past a layer keeps; its only effect is on the layer handed in."""

    paper: ClassVar[str]
    appends: ClassVar[bool] = False  # whether a commit leaves every earlier entry as it is
    wants_poses: ClassVar[bool] = False  # whether it must be told where the camera stands
    dense_only: ClassVar[bool] = False  # whether no index of the past can follow what it does
    whole_frames: ClassVar[bool] = False  # whether entries move by whole latent frames alone
    traceable: ClassVar[bool] = True  # whether an entry is found again by its position
    streams: ClassVar[int] = 1  # of a GPU, which take the layers' commits by turns

    @property
    def merges(self) -> bool:
        """Whether an entry may stand for several, or a slot in use be empty."""
        return False

    @property
    def wants_queries(self) -> bool:
        """Whether a commit reads the chunk's rotated queries: own "queries" [B, H, S, D]."""
        return False

    @property
    def view_depends_on_pass(self) -> bool:
        """Whether what is seen of the past, and where it stands, hangs on the pass."""
        return False

    @property
    def grows(self) -> bool:
        """Whether the past has no bound, so that tensors grow between chunks."""
        return False

    @property
    def keeps_unrotated(self) -> bool:
        """Whether unrotated keys are kept beside the rotated ones."""
        return False

    def cache_heads(self, shape: Shape) -> int:
        """1 where all heads keep the same entries, else the number of key/value heads."""
        return 1

    @abc.abstractmethod
    def capacity(self, shape: Shape, prompt: int, frames: int | None) -> int:
        """Slots to reserve, the present chunk's included; raises where a budget cannot be kept."""

    def tensors(self, shape: Shape, slots: int, device: torch.device) -> Tensors:
        """Further tensors of a layer, its own "cache" ones."""
        return {}

    @abc.abstractmethod
    def commit(
        self,
        layer: KVStore,
        ctx: PassContext,
        n: int,
        rotate: Rotate,
        meter: Meter,
        on_merge: OnMerge | None = None,
    ) -> int:
        """Take the first n entries of now into the past, within budget; entries of past after.

        `on_merge` is told of entries that joined, by the slots in which they stood before.
        """

    def past_in_pass(self, shape: Shape, past: int, tokens: int) -> int:
        """Entries of the past that are left when a chunk's first pass has brought its queries."""
        return past

    def compress(
        self, layer: KVStore, ctx: PassContext, q: Tensor, past: int, rotate: Rotate, meter: Meter
    ) -> None:
        """In a chunk's first pass, its entries written behind the past: bring that down to `past`.

        Asked where `past_in_pass` says so, with the rotated queries [B, H, S, D].
        """
        return None

    def is_full(self, shape: Shape, past: int, room: int, total: int) -> bool:
        """Whether chunks ask for the same launches from here on, after `total` entries in all."""
        return past == room

    def retrieve_by(
        self, layer: KVStore, shape: Shape, total: int, poses: Tensor, meter: Meter
    ) -> None:
        """Before a chunk whose camera stands at poses [B, F, 3, 4]: bring what was seen from there.

        Asked where `wants_poses`; `total` entries came before.
        """
        return None

    def hidden_slots(self, layer: KVStore, ctx: PassContext, rotate: Rotate) -> tuple[int, int]:
        """Before a pass, where the policy moves: bring entries to where the pass sees them.

        Returns the slots of the past, from and to, that it does not see.
        """
        return 0, 0


def checked_capacity(
    policy: str, budget: Size, shape: Shape, prompt: int, sink: int, newest: int
) -> int:
    """Slots of a bounded cache; raises where the budget is below what must be kept."""
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


def clamp_distance(layer: KVStore, past: int, nearest: Tensor, rotate: Rotate) -> None:
    """Let no entry of the past stand before the latent frame `nearest` [B, Hkv or 1, 1].

    An entry that is moved once is moved ever after, so its own place is not needed again.
    """
    time = layer.pos[:, :, :past, 0]
    moved = time < nearest
    time.copy_(time.maximum(nearest))
    layer.rotate(slice(0, past), rotate, moved)


def check_whole_frames(policy: str, budget: Size, shape: Shape) -> None:
    """Raise where a budget is no whole number of latent frames."""
    if budget.entries(shape) % shape.tokens_per_frame:
        raise TachyscopeError(
            f"cache policy {policy!r}: budget={budget} is no whole number of latent frames of "
            f"{shape.tokens_per_frame} entries: give it as frames, for example 21f"
        )


def stand_at(
    layer: KVStore, slots: slice, time: Tensor, tokens_per_frame: int, rotate: Rotate
) -> None:
    """Let entries stand in latent frames from `time` [B, Hkv or 1, 1] on, as many as fill one."""
    index = torch.arange(slots.stop - slots.start, device=time.device) // tokens_per_frame
    layer.pos[:, :, slots, 0] = time + index
    layer.rotate(slots, rotate)
