"""A layer's past in host memory by groups of latent frames, each with a key that it is found by.

A layer has four runs of slots: the sink, `places` of a group each, the frames that are in no group
yet, and behind them the present chunk. Frames that leave the newest are sealed by groups: what a
group keeps is written to host memory. Before a chunk the groups with the nearest keys are brought
to the places.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.types import Shape
from tachyscope.kernels.host_blocks import load_blocks, store_blocks
from tachyscope.store.bank_layout import COUNTERS, GIVEN, NEWEST, host_tensors
from tachyscope.store.host_bank import HostBank

if TYPE_CHECKING:
    from tachyscope.store.kv import KVStore
    from tachyscope.store.layer_pass import LayerPass

MOST_BLOCK = 128  # entries that a kernel copies at once
NEAR = 1e-6  # distances that differ by less are alike: rounding alone must not choose


class FrameLayout(NamedTuple):
    """How a layer's slots and its bank are cut up."""

    sink: int  # latent frames
    places: int  # groups that are retrieved
    newest: int  # latent frames that are in no group yet, at least so many
    group: int  # latent frames of a group
    kept: int  # entries of a group after pruning
    most: int  # groups that the bank holds
    grid: tuple[int, int]  # rows and columns of a latent frame
    bank: type[FrameBank]  # how groups are found
    log_weight: float = 0.0  # added to the scores of what is retrieved, or of the nearest of it
    spread: tuple[float, ...] = ()  # what of a difference of keys is one standard deviation

    @property
    def tokens(self) -> int:
        """Entries of a latent frame."""
        return self.grid[0] * self.grid[1]

    @property
    def block(self) -> int:
        """Entries of a block: a group is so many whole ones."""
        return max(n for n in range(1, MOST_BLOCK + 1) if self.kept % n == 0)

    @property
    def blocks(self) -> int:
        """Blocks of a group."""
        return self.kept // self.block

    @property
    def first(self) -> int:
        """The slot of the first place."""
        return self.sink * self.tokens

    @property
    def room(self) -> int:
        """The most slots of the past."""
        tail = (self.newest + self.group - 1) * self.tokens
        return self.first + self.places * self.kept + tail

    def sealed(self, total: int) -> int:
        """Groups that were sealed of so many entries."""
        return max(0, total // self.tokens - self.sink - self.newest) // self.group

    def tail(self, total: int) -> int:
        """Latent frames behind the sink that are in no group."""
        return max(0, total // self.tokens - self.sink - self.sealed(total) * self.group)


@dataclass(slots=True)
class FrameBank(HostBank, abc.ABC):
    """Groups of one layer, on the host and by key.

    tensors, on the device, beside those of `HostBank`:
      key    [B, most, W]   mean key of a group's frames
      age    [most]         how many groups had been sealed before it; -1: none is there
      place  [B, places]    which group stands there, -1 for none
      tail   [B, frames, W] keys of the frames that are in no group
      alike  [most]         how like an older group it is, of what was given GIVEN less
      given                 given entries that are not sealed, the sink's among them
    now: keys of the present chunk's frames [B, F, W]
    """

    key_dtype: ClassVar[torch.dtype]

    layout: FrameLayout
    tensors: dict[str, Tensor]
    work: dict[str, Tensor]
    host: dict[str, Tensor]
    now: Tensor | None = None

    @classmethod
    def empty(
        cls,
        layout: FrameLayout,
        shape: Shape,
        host: str,
        dtype: torch.dtype,
        device: torch.device,
        memory: dict[str, Tensor] | None = None,
    ) -> Self:
        """No groups, in new host memory, or in that of a bank which has none either."""
        rows, blocks = (shape.batch, shape.kv_heads), layout.most * layout.blocks
        frames = layout.newest + layout.group - 1
        keys, width = {"key": layout.most, "tail": frames}, cls.width_of(shape)
        tensors = {
            name: torch.zeros(shape.batch, n, width, dtype=cls.key_dtype, device=device)
            for name, n in keys.items()
        }
        sizes = {
            "age": (layout.most,),
            "given": (1,),
            "place": (shape.batch, layout.places),
            "written": (*rows, blocks),
            "used": (1,),
            "sealed": (1,),
        }
        for name, size in sizes.items():
            tensors[name] = torch.zeros(size, dtype=torch.int32, device=device)
        tensors["alike"] = torch.zeros(layout.most, dtype=torch.float32, device=device)
        bank = cls(
            layout,
            tensors,
            {
                "counters": torch.zeros(len(COUNTERS), dtype=torch.float64, device=device),
                "log_weight": torch.zeros(
                    shape.batch,
                    1,
                    layout.room + shape.max_pass_tokens,
                    dtype=torch.float32,
                    device=device,
                ),  # fmt: skip
            }
            | cls.constants(shape, device),
            memory
            or host_tensors((*rows, blocks, layout.block), shape.head_dim, host, dtype, device),
        )
        bank.clear()
        return bank

    @classmethod
    @abc.abstractmethod
    def width_of(cls, shape: Shape) -> int:
        """Numbers of a key."""

    @classmethod
    def constants(cls, shape: Shape, device: torch.device) -> dict[str, Tensor]:
        """Tensors that keys are made with."""
        return {}

    def clear(self) -> None:
        for name, x in self.tensors.items():
            if name != "sealed":
                x.fill_(-1 if name in ("age", "place") else 0)
        self.work["log_weight"].zero_()

    def rewind(self, layer: KVStore, past: int) -> None:
        raise TachyscopeError(
            "a bank of latent frames counts them from the video's start, so that none of them can "
            "be dropped: take another cache, or attention=ann"
        )

    def ranges(self) -> dict[str, tuple[int, int]]:
        most, count = self.layout.most, 2**31 - 1
        return {
            "bank.age": (-1, count),
            "bank.place": (-1, most - 1),
            "bank.written": (0, count),
            "bank.used": (0, most * self.layout.blocks),
            "bank.given": (0, count),
            "bank.sealed": (0, count),
        }

    # ---- a commit

    def seal(self, p: LayerPass, n: int) -> int:
        layer, past, total = p.layer, p.ctx.past, p.ctx.total
        layout, tail = self.layout, self.tensors["tail"]
        self.note(p, n)
        assert self.now is not None
        if p.ctx.given:
            self.tensors["given"] += n
        size, end = layout.group * layout.tokens, past + n
        before, after = layout.sealed(total), layout.sealed(total + n)
        held = layout.tail(total)
        new = layout.tail(total + n) + (after - before) * layout.group - held  # but the sink's
        keys = torch.cat([tail[:, :held], self.now[:, self.now.shape[1] - new :]], 1)
        for group in range(before, after):
            places = min(group, layout.places)
            start = layout.first + places * layout.kept
            self.prune(layer, start)
            self._write(layer, start, keys[:, : layout.group].mean(1), places)
            keys = keys[:, layout.group :]
            to = start + (layout.kept if group < layout.places else 0)
            layer.move(start + size, to, end - start - size)
            end -= start + size - to
        tail[:, : keys.shape[1]] = keys
        return end

    def note(self, p: LayerPass, n: int) -> None:
        """Make the keys of n final entries behind the past, unless they were told before."""

    def prune(self, layer: KVStore, start: int) -> None:
        """Bring what a group keeps to the front of its slots, where that is not all of it."""

    def _write(self, layer: KVStore, start: int, key: Tensor, place: int) -> None:
        """Write the group that begins at a slot to host memory."""
        layout, own = self.layout, self.tensors
        groups = own["sealed"] // layout.blocks
        number = self.number(groups, own["used"] // layout.blocks, key)
        index = torch.arange(layout.blocks, dtype=torch.int32, device=number.device)
        rows = own["written"].shape[:2]
        ids = (number * layout.blocks + index).expand(*rows, -1).contiguous()
        k, v = (x[:, :, start : start + layout.kept] for x in (layer.k, layer.v))
        store_blocks(k, v, index.expand(*rows, -1).contiguous(), self.host_blocks, ids)
        own["sealed"] += layout.blocks
        own["used"].copy_((own["used"] + layout.blocks).clamp(max=layout.most * layout.blocks))
        own["written"].scatter_(2, ids.long(), own["sealed"].expand(ids.shape))
        own["key"].index_copy_(1, number.long(), key.unsqueeze(1))
        own["age"].index_copy_(0, number.long(), groups)
        # what stood there is gone; while there are places the group stays where it is
        own["place"].masked_fill_(own["place"] == number, -1)
        if place < layout.places:
            own["place"][:, place : place + 1] = number

    def number(self, groups: Tensor, used: Tensor, key: Tensor) -> Tensor:
        """What a group [1] with a key [B, W] becomes: a new one, or when all are in use the one
        that leaves: of two alike the newer, and what was given last."""
        layout, own = self.layout, self.tensors
        newest = own["age"] >= groups - layout.most // NEWEST
        leaves = own["alike"].masked_fill(newest, -torch.inf).argmax(0, keepdim=True)
        number = torch.where(used < layout.most, used, leaves.to(torch.int32))
        alike = torch.exp(-self.spread_apart(own["key"], key) / 2).mean(0).float()
        alike.masked_fill_(own["age"] < 0, 0.0).index_fill_(0, number.long(), 0.0)
        alike = alike.amax(0, keepdim=True) - GIVEN * (own["given"] > layout.first).float()
        own["alike"].index_copy_(0, number.long(), alike)
        own["given"].sub_(layout.group * layout.tokens).clamp_(min=0)
        return number

    @abc.abstractmethod
    def spread_apart(self, keys: Tensor, key: Tensor) -> Tensor:
        """How many standard deviations, squared, the bank's keys [B, n, W] are from one [B, W]."""

    # ---- before a chunk

    def retrieve(self, layer: KVStore, key: Tensor) -> None:
        """Bring the groups that are nearest to a key [B, W] to the places."""
        layout, own = self.layout, self.tensors
        wanted = self._nearest(key)
        there = own["place"].unsqueeze(2) == wanted.unsqueeze(1)
        stays, comes = there.any(2), ~there.any(1)
        # the i-th that comes gets the i-th place that is free
        order = comes.to(torch.int8).argsort(dim=1, descending=True, stable=True)
        rank = ((~stays).long().cumsum(1) - 1).clamp(min=0)
        fetched = torch.where(stays, -1, wanted.gather(1, order).gather(1, rank)).to(torch.int32)
        own["place"].copy_(torch.where(stays, own["place"], fetched))
        index = torch.arange(layout.blocks, dtype=torch.int32, device=fetched.device)
        ids = fetched.unsqueeze(2) * layout.blocks + index
        ids = torch.where(fetched.unsqueeze(2) < 0, -1, ids).flatten(1).unsqueeze(1)
        ids = ids.expand(-1, layer.k.shape[1], -1).contiguous()
        slots = slice(layout.first, layout.first + layout.places * layout.kept)
        load_blocks(self.host_blocks, ids, layer.k[:, :, slots], layer.v[:, :, slots])
        counters = self.work["counters"]
        counters[COUNTERS.index("blocks_wanted")] += ids.numel()
        counters[COUNTERS.index("blocks_fetched")] += (ids >= 0).sum()

    def _nearest(self, key: Tensor) -> Tensor:
        """The groups [B, places] nearest to a key [B, W], of those alike the older first."""
        age = self.tensors["age"]
        by_age = age.argsort(stable=True)
        apart = self.distances(self.tensors["key"][:, by_age], key, (age < 0)[by_age])
        apart = (apart / NEAR).round().masked_fill((age < 0)[by_age], torch.inf)
        return by_age[apart.argsort(dim=1, stable=True)[:, : self.layout.places]]

    def distances(self, keys: Tensor, key: Tensor, none: Tensor) -> Tensor:
        """What groups are chosen by: of their keys [B, n, W], oldest first, `none` [n] being none
        at all, and the key that is wanted."""
        return self.spread_apart(keys, key)

    def weigh(self, weight: Tensor) -> None:
        """Note what is added to the scores of the groups that are there, [B, places]."""
        layout = self.layout
        held = slice(layout.first, layout.first + layout.places * layout.kept)
        weight = weight.masked_fill(self.tensors["place"] < 0, 0.0).float()
        self.work["log_weight"][:, 0, held] = weight.repeat_interleave(layout.kept, 1)

    def log_weights(self, end: int) -> Tensor:
        """What is added to the scores of the first slots in the present chunk, [B, 1, end]."""
        return self.work["log_weight"][:, :, :end]
