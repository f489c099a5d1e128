"""What to remember: policies that bring a layer's past within a budget."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from tachyscope.errors import TachyscopeError
from tachyscope.kernels.slots import shift
from tachyscope.meter import Meter
from tachyscope.types import LayerCache, PassContext, Shape, Size

# unrotated keys [B, Hkv, n, D] and their new positions -> rotated keys
Rotate = Callable[[Tensor, Tensor], Tensor]
# told that slots `source` joined slots `root`, both [B, Hkv or 1, e]
OnMerge = Callable[[PassContext, Tensor, Tensor], None]


class CachePolicy(abc.ABC):
    """Decides which past a layer keeps; its only effect is on the layer handed in."""

    paper: ClassVar[str]
    appends: ClassVar[bool] = False  # whether a commit leaves every earlier entry as it is

    @property
    def merges(self) -> bool:
        """Whether an entry may stand for several, or a slot in use be empty."""
        return False

    @property
    def wants_queries(self) -> bool:
        """Whether a commit reads the chunk's rotated queries: extra["queries"] [B, H, S, D]."""
        return False

    @property
    def view_depends_on_pass(self) -> bool:
        """Whether what is seen of the past, and where it stands, hangs on the pass."""
        return False

    @property
    @abc.abstractmethod
    def grows(self) -> bool:
        """Whether the past has no bound, so that tensors grow between chunks."""

    @property
    @abc.abstractmethod
    def keeps_unrotated(self) -> bool:
        """Whether unrotated keys are kept beside the rotated ones."""

    @abc.abstractmethod
    def cache_heads(self, shape: Shape) -> int:
        """1 where all heads keep the same entries, else the number of key/value heads."""

    @abc.abstractmethod
    def capacity(self, shape: Shape, prompt: int, frames: int | None) -> int:
        """Slots to reserve, the present chunk's included; raises where a budget cannot be kept."""

    @abc.abstractmethod
    def tensors(self, shape: Shape, slots: int, device: torch.device) -> dict[str, Tensor]:
        """Further tensors of a layer; those named slot_* hold one thing a slot in dimension 2."""

    @abc.abstractmethod
    def commit(
        self,
        layer: LayerCache,
        ctx: PassContext,
        n: int,
        rotate: Rotate,
        meter: Meter,
        on_merge: OnMerge | None = None,
    ) -> int:
        """Take the first n entries of now into the past, within budget; entries of past after.

        `on_merge` is told of entries that joined, by the slots in which they stood before.
        """

    def hidden_slots(self, layer: LayerCache, ctx: PassContext, rotate: Rotate) -> tuple[int, int]:
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


def clamp_distance(layer: LayerCache, past: int, nearest: Tensor, rotate: Rotate) -> None:
    """Let no entry of the past stand before the latent frame `nearest` [B, Hkv or 1, 1].

    An entry that is moved once is moved ever after, so its own place is not needed again.
    """
    assert layer.unrotated is not None
    pos = layer.pos[:, :, :past]
    moved = (pos[..., 0] < nearest).unsqueeze(-1)
    pos[..., 0] = pos[..., 0].maximum(nearest)
    groups = pos.shape[1]
    k, raw = (x[:, :, :past].chunk(groups, 1) for x in (layer.k, layer.unrotated))
    # one after the other: angles are float64, and those of all heads together are not small
    for i in range(groups):
        own = slice(i, i + 1)
        k[i].copy_(torch.where(moved[:, own], rotate(raw[i], pos[:, own]), k[i]))


def shift_slots(layer: LayerCache, source: int, target: int, count: int) -> None:
    """Shift `count` entries from slot `source` down to slot `target`."""
    if source == target or count == 0:
        return
    own = (x for name, x in layer.extra.items() if name.startswith("slot_"))
    for x in (*layer.entries().values(), *own):
        shift(x, source, target, count)
