"""Which blocks of a bank are resident (LRU, with hysteresis), and which of them each tile reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tachyscope.kernels.admit import Residency, admit, best_slots, record_demand
from tachyscope.store.bank_layout import BankLayout

# the first pass waits until at most one place in so many has been filled: of 21 resident latent
# frames about 8, which takes a bus of 50 GB/s 13 ms a chunk of Wan 1.3B at 480p in int4
AT_ONCE = 2


class Choice(NamedTuple):
    """What tiles wanted, until it is settled what they read once all of it has come."""

    mass: Tensor  # [B, H, tiles, blocks of the bank]
    wanted: Tensor | None  # [B, H, tiles, n] of them; None: tiles read all that is resident
    first: Tensor  # [B, Hkv, places] which block stands where in the first pass
    lists: list[Tensor]  # [B, H, tiles, n] the last is written: places; none where all are read
    ahead: int  # blocks before the places
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

    def choose(self, mass: Tensor, past: int, read: int | None, early: bool, passes: int) -> None:
        """Write which blocks each tile reads, by its mass [B, H, tiles, blocks] on each.

        A tile reads `read` blocks, the sink's and the newest's among them; without it all that are
        resident, which are those of most summed mass. Of the `passes` that the choice is made for
        the first is `early`: it runs before all that is fetched has come, and what the others read
        is left to `settle`.
        """
        layout, own, work = self.layout, self.tensors, self.work
        sink, held, newest = layout.blocks(past)
        rest = mass[..., sink : mass.shape[3] - newest]
        ahead = 0 if layout.coded else sink  # blocks before the places, as tiles list them
        own["choices"] += 1
        values, ids, lists = rest, None, list[Tensor]()
        if read is not None:
            lists = self._lists(past, mass.shape[2], read)
            values, ids = rest.topk(lists[0].shape[3], -1, sorted=False)
        if past < layout.room:  # all that there is is resident
            record_demand(values, ids, own["choices"], own["wanted"])
            if ids is not None:
                lists[1].copy_(ids + ahead)
            self._count(rest.shape[:3].numel() * (held if ids is None else ids.shape[3]) * passes)
            return
        at_once = max(1, layout.places // AT_ONCE) if early else layout.places
        residency = Residency(
            own["choices"], own["wanted"], own["place"], own["block"], work["now"], work["later"]
        )
        first = admit(values, ids, residency, at_once)
        if early and ids is not None:
            # until what is fetched has come, a tile reads the best of what is there
            best_slots(rest, first, lists[0], ahead)
        self.choice = Choice(rest, ids, first, lists, ahead, passes)
        if not early:
            self.settle()

    def _lists(self, past: int, tiles: int, read: int) -> list[Tensor]:
        """What is left of the first pass's and the others' tables [B, H, tiles, n] to be written,
        beside the sink's and the newest's blocks, which all tiles read; of codes these are none."""
        sink, held, newest = self.layout.blocks(past)
        work, out = self.work, list[Tensor]()
        if self.layout.coded:
            read -= sink + newest
            work["count"][:, :, :tiles] = read
            return [work[name][:, :, :tiles, :read] for name in ("first", "map")]
        place = torch.arange(sink + held + newest, dtype=torch.int32, device=work["map"].device)
        for name in ("first", "map"):
            table = work[name][:, :, :tiles, :read]
            table[..., :sink] = place[:sink]
            table[..., sink : sink + newest] = place[sink + held :]
            out.append(table[..., sink + newest :])
        work["count"][:, :, :tiles] = read
        return out

    def settle(self) -> None:
        """Write which blocks tiles read once all that was chosen has come, and count."""
        assert self.choice is not None
        mass, wanted, first, lists, ahead, passes = self.choice
        self.choice = None
        own, work = self.tensors, self.work
        fetched = sum((work[name] >= 0).sum() for name in ("now", "later"))
        if wanted is None:  # none is denied: what tiles want is what is resident
            tiles = mass.shape[1] // first.shape[1] * mass.shape[2]
            late = (work["later"] >= 0).sum() * tiles
            self._count(first.numel() * tiles * passes, late, 0, fetched)
            return
        best_slots(mass, own["block"], lists[1], ahead)
        wanted = wanted.unflatten(1, (first.shape[1], -1)).flatten(2)
        place = own["place"].gather(2, wanted)
        there = place >= 0
        # late is what comes to a place where another block, or none, stood at first
        late = there & (first.gather(2, place.long().clamp(min=0)) != wanted)
        self._count(wanted.numel() * passes, late.sum(), (~there).sum() * passes, fetched)

    def _count(self, *values: int | Tensor) -> None:
        for i, value in enumerate(values):
            self.work["counters"][i] += value
