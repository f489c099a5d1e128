"""Which blocks of a bank are resident, and which of them each tile of queries reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tachyscope.store.bank_layout import BankLayout

# the first pass waits until at most one place in so many has been filled: of 21 resident latent
# frames about 4, which takes a bus of 50 GB/s 7 ms a chunk of Wan 1.3B at 480p in int4
AT_ONCE = 4


class Choice(NamedTuple):
    """What tiles wanted, until it is settled what they read once all of it has come."""

    mass: Tensor  # [B, H, tiles, blocks of the bank]
    wanted: Tensor  # [B, H, tiles, n] of them
    first: Tensor  # [B, Hkv, places] which block stands where in the first pass
    map: Tensor  # [B, H, tiles, n] is written: places
    sink: int
    passes: int


@dataclass(slots=True)
class Residents:
    """A bank's tensors, as `BlockBank` lists them, and the choice among its blocks.

    Nothing here looks at data: on a GPU no launch depends on it, so that chunks can be recorded.
    """

    layout: BankLayout
    tensors: dict[str, Tensor]
    work: dict[str, Tensor]
    choice: Choice | None = field(default=None, init=False)  # not settled yet

    def choose(self, mass: Tensor, past: int, read: int, early: bool, passes: int) -> None:
        """Write which blocks each tile reads, by its mass [B, H, tiles, blocks] on each.

        A tile reads `read` blocks, the sink's and the newest's among them. Of the `passes` that the
        choice is made for the first is `early`: it runs before all that is fetched has come, and
        what the others read is left to `settle`.
        """
        layout, own, work = self.layout, self.tensors, self.work
        sink, held, newest = layout.blocks(past)
        tiles, best = mass.shape[2], read - sink - newest
        maps = [work[name][:, :, :tiles, :read] for name in ("first", "map")]
        place = torch.arange(sink + held + newest, dtype=torch.int32, device=mass.device)
        for x in maps:
            x[..., :sink] = place[:sink]
            x[..., sink : sink + newest] = place[sink + held :]
        own["choices"] += 1
        work["count"][:, :, :tiles] = read
        full = past == layout.room
        rest = mass[..., sink : mass.shape[3] - newest]
        if not full:  # all that there is is resident
            chosen = rest.topk(best, -1, sorted=False)
            self._note(chosen.values, chosen.indices)
            maps[1][..., sink + newest :] = chosen.indices + sink
            self._count(chosen.indices.numel() * passes)
            return
        chosen = rest.topk(best, -1, sorted=False)
        at_once = max(1, layout.places // AT_ONCE) if early else layout.places
        first = self._admit(self._note(chosen.values, chosen.indices), at_once)
        first_map, later_map = (x[..., sink + newest :] for x in maps)
        if early:  # until what is fetched has come, a tile reads the best of what is there
            self._read_best(rest, first, first_map, sink)
        self.choice = Choice(rest, chosen.indices, first, later_map, sink, passes)
        if not early:
            self.settle()

    def settle(self) -> None:
        """Write which blocks tiles read once all that was chosen has come, and count."""
        assert self.choice is not None
        mass, wanted, first, later_map, sink, passes = self.choice
        self.choice = None
        own, work = self.tensors, self.work
        self._read_best(mass, own["block"], later_map, sink)
        group = mass.shape[1] // own["block"].shape[1]
        before, after = (
            self._places_of(blocks).repeat_interleave(group, 1).gather(2, wanted.flatten(2)) >= 0
            for blocks in (first, own["block"])
        )
        late, denied = (after & ~before).sum(), (~after).sum() * passes
        fetched = sum((work[name] >= 0).sum() for name in ("now", "later"))
        self._count(wanted.numel() * passes, late, denied, fetched)

    def _read_best(self, mass: Tensor, blocks: Tensor, out: Tensor, sink: int) -> None:
        """Write the places out [B, H, tiles, n] of a tile's best among blocks [B, Hkv, places]."""
        if out.shape[3] == blocks.shape[2]:  # all of them
            out.copy_(torch.arange(sink, sink + blocks.shape[2], device=out.device))
            return
        blocks = blocks.repeat_interleave(mass.shape[1] // blocks.shape[1], 1).unsqueeze(2)
        there = blocks.expand(-1, -1, mass.shape[2], -1)
        near = mass.gather(3, there.long().clamp(min=0)).masked_fill(there < 0, -1.0)
        out.copy_(near.topk(out.shape[3], -1, sorted=False).indices + sink)

    def _note(self, mass: Tensor, ids: Tensor) -> Tensor:
        """The summed mass of every block that a tile wants [B, Hkv, most], times 2^40; else 0."""
        own, layout = self.tensors, self.layout
        heads = own["wanted"].shape[1]
        index, mass = (x.unflatten(1, (heads, -1)).flatten(2) for x in (ids, mass))
        size = (*own["wanted"].shape[:2], layout.most)
        demand = torch.zeros(size, dtype=torch.int64, device=mass.device)
        # as whole numbers: a GPU adds them up in any order, and the sum is the same
        demand.scatter_add_(2, index, (mass.double() * 2**40).long().clamp(min=1))
        share = demand.float() / demand.amax(-1, keepdim=True) * 0.99
        own["wanted"].copy_(torch.where(demand > 0, own["choices"] + share, own["wanted"]))
        return demand

    def _admit(self, demand: Tensor, at_once: int) -> Tensor:
        """Settle which blocks are resident from now on, and which of them are to be fetched.

        All that are wanted, of largest mass first, then those wanted last. The first `at_once` of a
        head that are to be fetched are so at once: which block then stands in each place.
        """
        own, work, layout = self.tensors, self.work, self.layout
        resident = own["place"][:, :, :-1] >= 0
        score = own["wanted"].masked_fill(~(resident | (demand > 0)), -1.0)
        best = score.topk(layout.places, -1)
        ids = best.indices.to(torch.int32)
        comes = (best.values >= 0) & (at_or(own["place"], ids, 0) < 0)
        # a block stays unless it is not among the best
        kept = torch.zeros(*score.shape[:2], layout.most + 1, dtype=torch.bool, device=ids.device)
        kept.scatter_(2, best.indices, best.values >= 0)
        stays = (own["block"] >= 0) & at_or(kept, own["block"], 0)
        # the i-th that comes gets the i-th place that is free
        turn = (comes.long().cumsum(-1) - 1).masked_fill(~comes, layout.places)
        listed = F.pad(torch.full_like(ids, -1), (0, 1)).scatter_(2, turn, ids)
        rank = (~stays).long().cumsum(-1) - 1
        gets = ~stays & (rank < comes.sum(-1, keepdim=True))
        fetched = torch.where(gets, listed.gather(2, rank.clamp(min=0)), -1)
        now = work["now"].copy_(fetched.masked_fill(rank >= at_once, -1))
        work["later"].copy_(fetched.masked_fill(rank < at_once, -1))
        first = torch.where(now >= 0, now, own["block"])
        own["block"].copy_(torch.where(stays, own["block"], fetched))
        own["place"].copy_(self._places_of(own["block"]))
        return first

    def _places_of(self, blocks: Tensor) -> Tensor:
        """Where every block stands [B, Hkv, most + 1] when these [B, Hkv, places] do."""
        standing = torch.full_like(self.tensors["place"], -1)
        places = torch.arange(blocks.shape[2], dtype=torch.int32, device=blocks.device)
        standing.scatter_(2, or_last(blocks, self.layout.most), places.expand_as(blocks))
        standing[:, :, -1] = -1
        return standing

    def _count(self, *values: int | Tensor) -> None:
        for i, value in enumerate(values):
            self.work["counters"][i] += value


def at_or(x: Tensor, index: Tensor, none: float) -> Tensor:
    """x [B, Hkv, n] at index [B, Hkv, m], and `none` where that is below 0."""
    return x.gather(2, index.long().clamp(min=0)).masked_fill(index < 0, none)


def or_last(index: Tensor, last: int) -> Tensor:
    """An index, and where it is below 0 the last."""
    return torch.where(index < 0, last, index).long()
