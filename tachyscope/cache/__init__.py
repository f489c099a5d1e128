"""What to remember: policies that bring a layer's past within a budget."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from tachyscope.errors import TachyscopeError
from tachyscope.meter import Meter
from tachyscope.types import Layer, Moment, Shape, Size

# unrotated keys [B, Hkv, n, D] and their new positions -> rotated keys
Rotate = Callable[[Tensor, Tensor], Tensor]


class CachePolicy(abc.ABC):
    """Decides which past a layer keeps; its only effect is on the layer handed in."""

    paper: ClassVar[str]
    weighted: ClassVar[bool]  # an entry may stand for several, or a slot in use be empty

    @property
    @abc.abstractmethod
    def grows(self) -> bool:
        """Whether the past has no bound, so that tensors grow between chunks."""

    @property
    @abc.abstractmethod
    def raw(self) -> bool:
        """Whether unrotated keys are kept beside the rotated ones."""

    @abc.abstractmethod
    def groups(self, shape: Shape) -> int:
        """1 where all heads keep the same entries, else the number of key/value heads."""

    @abc.abstractmethod
    def capacity(self, shape: Shape, prompt: int, frames: int | None) -> int:
        """Slots to reserve, the present chunk's included; raises where a budget cannot be kept."""

    @abc.abstractmethod
    def tensors(self, shape: Shape, slots: int, device: torch.device) -> dict[str, Tensor]:
        """Further tensors of a layer; those named slot_* hold one thing a slot in dimension 2."""

    @abc.abstractmethod
    def commit(self, layer: Layer, at: Moment, n: int, rotate: Rotate, meter: Meter) -> int:
        """Take the first n entries of now into the past, within budget; entries of past after."""


def held(policy: str, budget: Size, shape: Shape, prompt: int, sink: int, newest: int) -> int:
    """Slots of a bounded cache; raises where the budget is below what must be kept."""
    slots, frames = budget.entries(shape), sink + newest + shape.chunk
    floor = prompt + frames * shape.places
    if slots < floor:
        need = f"{-(-floor // shape.places)}f"
        raise TachyscopeError(
            f"cache policy {policy!r}: budget={budget} holds {slots} entries, but {floor} are "
            f"protected (prompt {prompt}, sink {sink}f, newest {newest}f, present chunk "
            f"{shape.chunk}f): raise budget to {need} or more, or lower sink or newest"
        )
    return slots


def move(layer: Layer, source: int, target: int, count: int) -> None:
    """Shift `count` entries from slot `source` down to slot `target`."""
    if source == target or count == 0:
        return
    own = (x for name, x in layer.own.items() if name.startswith("slot_"))
    for x in (*layer.entries().values(), *own):
        # the ranges may overlap, so through a copy
        x[:, :, target : target + count] = x[:, :, source : source + count].clone()
