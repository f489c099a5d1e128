"""A layer's past offloaded by whole latent frames, each with a key that it is retrieved by.

For `attention=pose` (`store/pose_bank.py`) and `attention=similar` (`store/similar_bank.py`). The
cache slots of the past are: sink | resident slots | tail. A group is one latent frame here, several
in the lab's WorldKV. When frames leave the newest, `seal` writes them to host memory, group by
group. Before a chunk's first pass `retrieve` copies the groups of nearest keys to the resident
slots, and dense attention reads all that is resident, with the log-weights that `weigh` set.
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
NEAR = 1e-6  # distances that differ by less are equal, so that rounding does not choose


class FrameLayout(NamedTuple):
    """How a layer's cache slots and its bank are divided."""

    sink: int  # latent frames, always resident
    resident_slots: int  # groups that can be resident beside them
    newest: int  # latent frames that are not sealed yet, at least
    group: int  # latent frames of a group
    kept: int  # entries of a group after pruning
    capacity: int  # groups that host memory holds
    grid: tuple[int, int]  # rows and columns of a latent frame
    bank: type[FrameBank]
    log_weight: float = 0.0  # of retrieved groups; of the nearest, where it falls with distance
    spread: tuple[float, ...] = ()  # the standard deviations that distances of keys are divided by

    @property
    def tokens(self) -> int:
        """Entries of a latent frame."""
        return self.grid[0] * self.grid[1]

    @property
    def block(self) -> int:
        """Entries of a block of host memory, which divides a group."""
        return max(n for n in range(1, MOST_BLOCK + 1) if self.kept % n == 0)

    @property
    def blocks(self) -> int:
        """Blocks of a group."""
        return self.kept // self.block

    @property
    def first(self) -> int:
        """The first cache slot behind the sink, and the sink's entries."""
        return self.sink * self.tokens

    @property
    def room(self) -> int:
        """Cache slots of the longest past."""
        tail = (self.newest + self.group - 1) * self.tokens
        return self.first + self.resident_slots * self.kept + tail

    def sealed(self, total: int) -> int:
        """Groups sealed so far, of a video of `total` entries."""
        return max(0, total // self.tokens - self.sink - self.newest) // self.group

    def tail(self, total: int) -> int:
        """Latent frames behind the sink that are not sealed."""
        return max(0, total // self.tokens - self.sink - self.sealed(total) * self.group)


@dataclass(slots=True)
class FrameBank(HostBank, abc.ABC):
    """The groups of one layer. In tensors of `HostBank` a group counts as its blocks.

    tensors, beside those of `HostBank` (the names are those of snapshots):
      key    [B, capacity, W]     mean key of a group's frames
      age    [B * capacity]       groups sealed before it, so that the oldest is least; -1: unused
      place  [B, resident slots]  the `resident` group in each slot, -1: none
      tail   [B, frames, W]       keys of the frames that are not sealed
      alike  [B * capacity]       likeness to the most similar older group, 0 to 1, less GIVEN if it
                                  was given
      given  given entries that are not sealed, the sink's among them
    work:
      log_weight  [B, 1, cache slots]  added to scores in the present chunk
    now: keys [B, F, W] of the present chunk's frames
    """

    key_dtype: ClassVar[torch.dtype]
    key_width: ClassVar[int]  # numbers of a key

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
        """A bank without groups, in new host memory or in that of a bank that is no longer used."""
        heads, blocks = (shape.batch, shape.kv_heads), layout.capacity * layout.blocks
        tail, width = layout.newest + layout.group - 1, cls.key_width
        entries = layout.room + shape.max_pass_tokens
        sizes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "key": ((shape.batch, layout.capacity, width), cls.key_dtype),
            "tail": ((shape.batch, tail, width), cls.key_dtype),
            "age": ((shape.batch * layout.capacity,), torch.int32),
            "given": ((1,), torch.int32),
            "place": ((shape.batch, layout.resident_slots), torch.int32),
            "written": ((*heads, blocks), torch.int32),
            "used": ((1,), torch.int32),
            "sealed": ((1,), torch.int32),
            "alike": ((shape.batch * layout.capacity,), torch.float32),
        }
        work: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "counters": ((len(COUNTERS),), torch.float64),
            "log_weight": ((shape.batch, 1, entries), torch.float32),
        }
        made, buffers = (
            {name: torch.zeros(size, dtype=kind, device=device) for name, (size, kind) in x.items()}
            for x in (sizes, work)
        )
        size = (*heads, blocks, layout.block)
        memory = memory or host_tensors(size, shape.head_dim, host, dtype, device)
        bank = cls(layout, made, buffers | cls.constants(shape, device), memory)
        bank.clear()
        return bank

    @property
    def resident(self) -> Tensor:
        """The group in every resident slot [B, resident slots], -1: none."""
        return self.tensors["place"]

    @property
    def ages(self) -> Tensor:
        """`age` [B, capacity]."""
        return self.tensors["age"].view(len(self.resident), -1)

    @classmethod
    def constants(cls, shape: Shape, device: torch.device) -> dict[str, Tensor]:
        """Tensors that keys are computed with, part of `work`."""
        return {}

    def clear(self) -> None:
        for name, x in self.tensors.items():
            if name != "sealed":
                x.fill_(-1 if name in ("age", "place") else 0)
        self.work["log_weight"].zero_()

    def rewind(self, layer: KVStore, past: int) -> None:
        raise TachyscopeError(
            "a bank of latent frames counts them from the video's start, so that none of them can "
            "be dropped: take another cache, or attention=ann:read=0.4"
        )

    def ranges(self) -> dict[str, tuple[int, int]]:
        capacity, count = self.layout.capacity, 2**31 - 1
        return {
            "bank.age": (-1, count),
            "bank.place": (-1, capacity - 1),
            "bank.written": (0, count),
            "bank.used": (0, capacity * self.layout.blocks),
            "bank.given": (0, count),
            "bank.sealed": (0, count),
        }

    # ---- a commit

    def seal(self, p: LayerPass, n: int) -> int:
        layer, past, total = p.layer, p.ctx.past, p.ctx.total
        layout, tail = self.layout, self.tensors["tail"]
        self.make_keys(p, n)
        assert self.now is not None
        if p.ctx.given:
            self.tensors["given"] += n
        size, end = layout.group * layout.tokens, past + n
        before, after = layout.sealed(total), layout.sealed(total + n)
        held = layout.tail(total)
        # of the new frames those that are not the sink's
        new = layout.tail(total + n) + (after - before) * layout.group - held
        keys = torch.cat([tail[:, :held], self.now[:, self.now.shape[1] - new :]], 1)
        for group in range(before, after):
            slot = min(group, layout.resident_slots)
            start = layout.first + slot * layout.kept
            self.prune(layer, start)
            self._write(layer, start, keys[:, : layout.group].mean(1), slot)
            keys = keys[:, layout.group :]
            to = start + (layout.kept if group < layout.resident_slots else 0)
            layer.move(start + size, to, end - start - size)
            end -= start + size - to
        tail[:, : keys.shape[1]] = keys
        return end

    def make_keys(self, p: LayerPass, n: int) -> None:
        """Set `now` for n finished entries behind the past, where it is not set before a chunk."""

    def prune(self, layer: KVStore, start: int) -> None:
        """Move the entries of a group that are kept to its front, where not all are kept."""

    def _write(self, layer: KVStore, start: int, key: Tensor, slot: int) -> None:
        """Write the group at cache slot `start` to host memory; while resident slots are free it
        stays in `slot`."""
        layout, own = self.layout, self.tensors
        age = own["sealed"] // layout.blocks
        group = self.assign_group(age, own["used"] // layout.blocks, key)
        index = torch.arange(layout.blocks, dtype=torch.int32, device=group.device)
        rows = own["written"].shape[:2]
        ids = (group * layout.blocks + index).unsqueeze(1).expand(*rows, -1).contiguous()
        k, v = (x[:, :, start : start + layout.kept] for x in (layer.k, layer.v))
        store_blocks(k, v, index.expand(*rows, -1).contiguous(), self.host_blocks, ids)
        own["sealed"] += layout.blocks
        own["used"].copy_((own["used"] + layout.blocks).clamp(max=layout.capacity * layout.blocks))
        own["written"].scatter_(2, ids.long(), own["sealed"].expand(ids.shape))
        own["key"].scatter_(1, group.long().unsqueeze(2).expand(-1, 1, key.shape[1]), key[:, None])
        self.ages.scatter_(1, group.long(), age.expand(group.shape))
        # the group that is replaced is no longer resident
        self.resident.masked_fill_(self.resident == group, -1)
        if slot < layout.resident_slots:
            self.resident[:, slot : slot + 1] = group

    def assign_group(self, age: Tensor, used: Tensor, key: Tensor) -> Tensor:
        """The number [B, 1] of a new group with a key [B, W]: an unused one, or in a full bank that
        of the group most like an older one, given groups last."""
        layout, own, ages = self.layout, self.tensors, self.ages
        alike = own["alike"].view_as(ages)
        newest = ages >= age - layout.capacity // NEWEST
        leaves = alike.masked_fill(newest, -torch.inf).argmax(1, keepdim=True)
        group = torch.where(used < layout.capacity, used, leaves.to(torch.int32))
        likeness = torch.exp(-self.squared_distance(own["key"], key) / 2).float()
        likeness = likeness.masked_fill(ages < 0, 0.0).scatter(1, group.long(), 0.0)
        given = GIVEN * (own["given"] > layout.first).float()
        alike.scatter_(1, group.long(), likeness.amax(1, keepdim=True) - given)
        # given frames come first in a video, so they are sealed first
        own["given"].sub_(layout.group * layout.tokens).clamp_(min=0)
        return group

    @abc.abstractmethod
    def squared_distance(self, keys: Tensor, key: Tensor) -> Tensor:
        """Squared distances, in standard deviations, of keys [B, n, W] from one [B, W]."""

    # ---- before a chunk's first pass

    def retrieve(self, layer: KVStore, key: Tensor) -> None:
        """Make the groups of the keys nearest to key [B, W] resident; the others leave."""
        layout = self.layout
        wanted = self._nearest(key)
        there = self.resident.unsqueeze(2) == wanted.unsqueeze(1)
        stays, missing = there.any(2), ~there.any(1)
        # the i-th group to fetch gets the i-th free slot
        order = missing.to(torch.int8).argsort(dim=1, descending=True, stable=True)
        rank = ((~stays).long().cumsum(1) - 1).clamp(min=0)
        fetched = torch.where(stays, -1, wanted.gather(1, order).gather(1, rank)).to(torch.int32)
        self.resident.copy_(torch.where(stays, self.resident, fetched))
        index = torch.arange(layout.blocks, dtype=torch.int32, device=fetched.device)
        ids = fetched.unsqueeze(2) * layout.blocks + index
        ids = torch.where(fetched.unsqueeze(2) < 0, -1, ids).flatten(1).unsqueeze(1)
        ids = ids.expand(-1, layer.k.shape[1], -1).contiguous()
        slots = slice(layout.first, layout.first + layout.resident_slots * layout.kept)
        load_blocks(self.host_blocks, ids, layer.k[:, :, slots], layer.v[:, :, slots])
        counters = self.work["counters"]
        counters[COUNTERS.index("blocks_wanted")] += ids.numel()
        counters[COUNTERS.index("blocks_fetched")] += (ids >= 0).sum()

    def _nearest(self, key: Tensor) -> Tensor:
        """The groups [B, resident slots] nearest to key [B, W]; of equally near ones the oldest."""
        keys = self.tensors["key"]
        age, by_age = self.ages.sort(dim=1, stable=True)
        keys = keys.gather(1, by_age.unsqueeze(2).expand_as(keys))
        distance = self.distances(keys, key, age < 0)
        distance = (distance / NEAR).round().masked_fill(age < 0, torch.inf)
        nearest = distance.argsort(dim=1, stable=True)[:, : self.layout.resident_slots]
        return by_age.gather(1, nearest)

    def distances(self, keys: Tensor, key: Tensor, unused: Tensor) -> Tensor:
        """What groups are chosen by, the least first: of their keys [B, n, W] by age, of which
        `unused` [B, n] are no group's, from key [B, W]."""
        return self.squared_distance(keys, key)

    def weigh(self, weight: Tensor) -> None:
        """Set the log-weights [B, resident slots] of resident groups for the present chunk."""
        layout = self.layout
        span = slice(layout.first, layout.first + layout.resident_slots * layout.kept)
        weight = weight.masked_fill(self.resident < 0, 0.0).float()
        self.work["log_weight"][:, 0, span] = weight.repeat_interleave(layout.kept, 1)

    def log_weights(self, end: int) -> Tensor:
        """The log-weights of the first `end` cache slots in the present chunk, [B, 1, end]."""
        return self.work["log_weight"][:, :, :end]
