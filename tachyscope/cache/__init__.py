"""What to remember: policies that bring a layer's past within a budget."""

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
    "stand_at",
]


class CachePolicy(Policy, question="cache"):
    """Decides which past a layer keeps; its only effect is on the layer handed in."""

    appends: ClassVar[bool] = False  # whether a commit leaves every earlier entry as it is
    wants_poses: ClassVar[bool] = False  # whether it must be told where the camera stands
    dense_only: ClassVar[bool] = False  # whether no index of the past can follow what it does
    whole_frames: ClassVar[bool] = False  # whether entries move by whole latent frames alone
    traceable: ClassVar[bool] = True  # whether an entry is found again by its position
    stores_codes: ClassVar[bool] = True  # whether entries are as the plan's store says
    bounded_by: ClassVar[str] = "budget"  # the setting that says what a layer has on the device
    streams: ClassVar[int] = 1  # of a GPU, which take the layers' commits by turns
    host: str | None = None  # what a channel is in host memory; None: as on the device

    def check_plan(self, plan: Mapping[str, Any], shape: Shape) -> None:
        if (self.view_depends_on_pass or self.dense_only) and plan["attention"].name != "dense":
            then = ", or leave view out" if getattr(self, "view", None) is not None else ""
            raise TachyscopeError(
                f"cache={self} says itself what a pass reads, got "
                f"attention={plan['attention']}: use attention=dense{then}"
            )

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
        """Whether what is seen of the past, and where it stands, depends on the pass."""
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
    def commit(self, p: LayerPass, n: int) -> int:
        """Take the first n entries of now into the past, within budget; entries of past after.

        `p.on_merge` gets entries that joined, by the slots in which they stood before.
        """

    def past_in_pass(self, shape: Shape, past: int, tokens: int) -> int:
        """Entries of the past that are left when a chunk's first pass has brought its queries."""
        return past

    def compress(self, p: LayerPass, q: Tensor, past: int) -> None:
        """In a chunk's first pass, its entries written behind the past: bring that down to `past`.

        Asked where `past_in_pass` says so, with the rotated queries [B, H, S, D].
        """

    def is_full(self, shape: Shape, past: int, room: int, total: int) -> bool:
        """Whether chunks ask for the same launches from here on, after `total` entries in all."""
        return past == room

    def bank_layout(
        self, plan: Mapping[str, Any], shape: Shape, slots: int, latent_frames: int | None
    ) -> BankLayout | FrameLayout | None:
        """How a layer of so many slots is cut up whose past lies in host memory too; None where
        none does. Raises where the slots are too few."""
        return None

    def before_chunk(self, p: LayerPass, poses: Tensor) -> None:
        """Before a chunk whose camera stands at poses [B, F, 3, 4]; where `wants_poses`."""

    def hidden_slots(self, p: LayerPass) -> tuple[int, int]:
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


def stand_at(
    layer: KVStore, slots: slice, time: Tensor, tokens_per_frame: int, rotate: Rotate
) -> None:
    """Let entries stand in latent frames from `time` [B, Hkv or 1, 1] on, as many as fill one."""
    index = torch.arange(slots.stop - slots.start, device=time.device) // tokens_per_frame
    layer.pos[:, :, slots, 0] = time + index
    layer.rotate(slots, rotate)
