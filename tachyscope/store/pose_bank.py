"""A layer's past in host memory by groups of latent frames, each with the pose of its camera.

A layer of `cache=worldkv` has four runs of slots: the sink, `places` of a group each, the frames
that are in no group yet, and behind them the present chunk. Frames that leave the newest are sealed
by groups: entries most like the group's first frame are dropped, the others written to host memory.
Before a chunk the groups whose cameras stood most like the chunk's are brought to the places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tachyscope.errors import TachyscopeError
from tachyscope.kernels.host_blocks import load_blocks, store_blocks
from tachyscope.store.bank_layout import COUNTERS, host_tensors
from tachyscope.store.host_bank import HostBank
from tachyscope.types import Shape

if TYPE_CHECKING:
    from tachyscope.store.kv import KVStore

MOST_BLOCK = 128  # entries that a kernel copies at once
POSE = 12  # numbers of a camera-to-world matrix of 3 rows and 4 columns
NEAR = 1e-6  # distances that differ by less are alike: rounding alone must not choose


class PoseLayout(NamedTuple):
    """How a layer's slots and its bank are cut up."""

    sink: int  # latent frames
    places: int  # groups that are retrieved
    newest: int  # latent frames that are in no group yet, at least so many
    group: int  # latent frames of a group
    kept: int  # entries of a group after pruning
    most: int  # groups that the bank holds
    tokens: int  # of a latent frame

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
class PoseBank(HostBank):
    """Groups of one layer, on the host and by pose.

    tensors, on the device, beside those of `HostBank`:
      pose   [B, most, 12]   mean camera-to-world matrix of a group
      age    [most]          how many groups had been sealed before it; -1: none is there
      place  [B, places]     which group stands there, -1 for none
      tail   [B, frames, 12] poses of the frames that are in no group
    now: poses of the present chunk's frames [B, F, 12], told before its first pass
    """

    layout: PoseLayout
    tensors: dict[str, Tensor]
    work: dict[str, Tensor]
    host: dict[str, Tensor]
    now: Tensor | None = None

    @classmethod
    def empty(
        cls,
        layout: PoseLayout,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device,
        memory: dict[str, Tensor] | None = None,
    ) -> PoseBank:
        """No groups, in new host memory, or in that of a bank which has none either."""
        rows, blocks = (shape.batch, shape.kv_heads), layout.most * layout.blocks
        frames = layout.newest + layout.group - 1
        poses = {"pose": layout.most, "tail": frames}
        tensors = {
            name: torch.zeros(shape.batch, n, POSE, dtype=torch.float64, device=device)
            for name, n in poses.items()
        }
        sizes = {
            "age": (layout.most,),
            "place": (shape.batch, layout.places),
            "written": (*rows, blocks),
            "used": (1,),
            "sealed": (1,),
        }
        for name, size in sizes.items():
            tensors[name] = torch.zeros(size, dtype=torch.int32, device=device)
        bank = cls(
            layout,
            tensors,
            {"counters": torch.zeros(len(COUNTERS), dtype=torch.float64, device=device)},
            memory
            or host_tensors((*rows, blocks, layout.block), shape.head_dim, "native", dtype, device),
        )
        bank.clear()
        return bank

    def clear(self) -> None:
        for name, x in self.tensors.items():
            x.fill_(-1 if name in ("age", "place") else 0)

    def rewind(self, layer: KVStore, past: int) -> None:
        raise TachyscopeError(
            "cache=worldkv counts its groups from the video's start, so that none of it can be "
            "dropped: take another cache"
        )

    def ranges(self) -> dict[str, tuple[int, int]]:
        most, count = self.layout.most, 2**31 - 1
        return {
            "bank.age": (-1, count),
            "bank.place": (-1, most - 1),
            "bank.written": (0, count),
            "bank.used": (0, most * self.layout.blocks),
            "bank.sealed": (0, count),
        }

    # ---- a commit

    def seal(self, layer: KVStore, past: int, n: int, total: int) -> int:
        """Take n entries behind the past into it, of which `total` came before: its slots after."""
        layout, tail = self.layout, self.tensors["tail"]
        assert self.now is not None
        size, end = layout.group * layout.tokens, past + n
        before, after = layout.sealed(total), layout.sealed(total + n)
        held = layout.tail(total)
        new = layout.tail(total + n) + (after - before) * layout.group - held  # but the sink's
        poses = torch.cat([tail[:, :held], self.now[:, self.now.shape[1] - new :]], 1)
        for group in range(before, after):
            places = min(group, layout.places)
            start = layout.first + places * layout.kept
            self._prune(layer, start)
            self._write(layer, start, poses[:, : layout.group].mean(1), places)
            poses = poses[:, layout.group :]
            to = start + (layout.kept if group < layout.places else 0)
            layer.move(start + size, to, end - start - size)
            end -= start + size - to
        tail[:, : poses.shape[1]] = poses
        return end

    def _prune(self, layer: KVStore, start: int) -> None:
        """Bring a group's first frame and what is least like it to the front of the group's slots.

        An entry is as like it as the cosine of its key and the mean key of that frame, all heads in
        one vector.
        """
        layout = self.layout
        slots = slice(start, start + layout.group * layout.tokens)
        if layout.kept == slots.stop - slots.start:
            return
        k = layer.vectors("k", slots)
        k = k.to(torch.promote_types(k.dtype, torch.float32)).transpose(1, 2).flatten(2)
        mean = k[:, : layout.tokens].mean(1, keepdim=True)
        rest = k[:, layout.tokens :]
        alike = (rest * mean).sum(-1) / (rest.norm(dim=-1) * mean.norm(dim=-1) + 1e-8)
        # a stable sort leaves what is kept in order of time
        kept = layout.kept - layout.tokens
        dropped = torch.ones_like(alike, dtype=torch.int8)
        dropped.scatter_(1, alike.argsort(dim=1, stable=True)[:, :kept], 0)
        order = torch.cat([dropped.new_zeros(len(k), layout.tokens), dropped], 1)
        layer.gather(slots, order.argsort(dim=1, stable=True).unsqueeze(1))

    def _write(self, layer: KVStore, start: int, pose: Tensor, place: int) -> None:
        """Write the group that begins at a slot to host memory, where the oldest stands if full."""
        layout, own = self.layout, self.tensors
        groups = own["sealed"] // layout.blocks
        number = groups % layout.most
        index = torch.arange(layout.blocks, dtype=torch.int32, device=number.device)
        rows = own["written"].shape[:2]
        ids = (number * layout.blocks + index).expand(*rows, -1).contiguous()
        k, v = (x[:, :, start : start + layout.kept] for x in (layer.k, layer.v))
        store_blocks(k, v, index.expand(*rows, -1).contiguous(), self.host_blocks, ids)
        own["sealed"] += layout.blocks
        own["used"].copy_(own["sealed"].clamp(max=layout.most * layout.blocks))
        own["written"].scatter_(2, ids.long(), own["sealed"].expand(ids.shape))
        own["pose"].index_copy_(1, number.long(), pose.unsqueeze(1))
        own["age"].index_copy_(0, number.long(), groups)
        # what stood there is gone; while there are places the group stays where it is
        own["place"].masked_fill_(own["place"] == number, -1)
        if place < layout.places:
            own["place"][:, place : place + 1] = number

    # ---- before a chunk

    def retrieve(self, layer: KVStore, poses: Tensor) -> None:
        """Bring the groups whose cameras stood most like these [B, F, 12] to the places."""
        layout, own = self.layout, self.tensors
        wanted = self._nearest(poses.mean(1))
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

    def _nearest(self, now: Tensor) -> Tensor:
        """The groups [B, places] nearest to a pose [B, 12], of those alike the older first.

        Half of a distance is how far cameras stood apart, squared, half the angle between them,
        each as a part of the largest among the groups.
        """
        pose, age = self.tensors["pose"], self.tensors["age"]
        by_age = age.argsort(stable=True)
        pose, none = pose[:, by_age], (age < 0)[by_age]
        (rotation, place), (turned, here) = (_parts(x) for x in (pose, now.unsqueeze(1)))
        apart = (place - here).square().sum(-1)
        cosine = ((rotation * turned).sum((-2, -1)) - 1) / 2
        angle = cosine.clamp(-1, 1).arccos()
        distance = torch.zeros_like(apart)
        for part in (apart, angle):
            largest = part.masked_fill(none, 0).amax(1, keepdim=True)
            distance += 0.5 * part / torch.where(largest > 0, largest, 1)
        distance = (distance / NEAR).round().masked_fill(none, torch.inf)
        return by_age[distance.argsort(dim=1, stable=True)[:, : self.layout.places]]


def _parts(pose: Tensor) -> tuple[Tensor, Tensor]:
    """Rotation [..., 3, 3] and place [..., 3] of a pose [..., 12]."""
    matrix = pose.unflatten(-1, (3, 4))
    return matrix[..., :3], matrix[..., 3]
