"""Which blocks of a bank are resident (LRU, with hysteresis), and which of them each tile reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tachyscope.kernels.admit import Residency, admit, best_slots, record_demand
from tachyscope.store.bank_layout import BankLayout

# the first pass waits for at most 1/AT_ONCE of the resident slots to be filled: of 21 resident
# latent frames about 8, which a bus of 50 GB/s copies in 13 ms a chunk of Wan 1.3B at 480p in int4
AT_ONCE = 2


class BlockChoice(NamedTuple):
    """What the tiles of a chunk chose, until `finish_choice` has written what later passes read."""

    mass: Tensor  # [B, H, tiles, blocks of the bank]
    wanted: Tensor | None  # [B, H, tiles, n] block ids; None: tiles read all resident blocks
    first: Tensor  # [B, Hkv, resident slots] the block in each slot during the first pass
    tables: list[Tensor]  # [B, H, tiles, n] of the first pass and of later ones; [] where all read
    offset: int  # blocks that a table numbers before the resident slots
    passes: int


@dataclass(slots=True)
class ResidentBlocks:
    """A bank's tensors, as `BlockBank` lists them, and the choice among its blocks.

    No shape and no launch depends on data, so that a CUDA graph can record it.
    """

    layout: BankLayout
    tensors: dict[str, Tensor]
    work: dict[str, Tensor]
    choice: BlockChoice | None = field(default=None, init=False)  # until `finish_choice`

    @property
    def slot_of(self) -> Tensor:
        """The resident slot of every block, as `Residency.slot`."""
        return self.tensors["place"]

    def choose(self, mass: Tensor, past: int, read: int | None, early: bool, passes: int) -> None:
        """Choose the resident blocks and what each tile reads, by mass [B, H, tiles, blocks].

        A tile reads `read` blocks, the sink's and the newest's among them; with None it reads all
        resident blocks, those of largest summed mass. The choice serves `passes` passes. If it is
        `early` the first of them runs before all copies are done, and `finish_choice` must be
        called to write what the others read.
        """
        layout, own, work = self.layout, self.tensors, self.work
        sink, held, newest = layout.blocks(past)
        sealed = mass[..., sink : mass.shape[3] - newest]
        offset = 0 if layout.coded else sink
        own["choices"] += 1
        values, ids, tables = sealed, None, list[Tensor]()
        if read is not None:
            tables = self._tables(past, mass.shape[2], read)
            values, ids = sealed.topk(tables[0].shape[3], -1, sorted=False)
        if past < layout.room:  # every block is resident
            record_demand(values, ids, own["choices"], own["wanted"])
            if ids is not None:
                tables[1].copy_(ids + offset)
            read_each = held if ids is None else ids.shape[3]
            self._count(sealed.shape[:3].numel() * read_each * passes)
            return
        at_once = max(1, layout.resident_slots // AT_ONCE) if early else layout.resident_slots
        residency = Residency(
            own["choices"], own["wanted"], self.slot_of, own["block"], work["now"], work["later"]
        )
        first = admit(values, ids, residency, at_once)
        if early and ids is not None:
            # until the prefetch is done a tile reads the best of what is already there
            best_slots(sealed, first, tables[0], offset)
        self.choice = BlockChoice(sealed, ids, first, tables, offset, passes)
        if not early:
            self.finish_choice()

    def _tables(self, past: int, tiles: int, read: int) -> list[Tensor]:
        """The columns of the first and later passes' block tables [B, H, tiles, n] that a choice
        fills, behind those of the sink and the newest, which float8 tables do not list."""
        sink, held, newest = self.layout.blocks(past)
        work, out = self.work, list[Tensor]()
        if self.layout.coded:
            read -= sink + newest
            work["count"][:, :, :tiles] = read
            return [work[name][:, :, :tiles, :read] for name in ("first", "map")]
        blocks = torch.arange(sink + held + newest, dtype=torch.int32, device=work["map"].device)
        for name in ("first", "map"):
            table = work[name][:, :, :tiles, :read]
            table[..., :sink] = blocks[:sink]
            table[..., sink : sink + newest] = blocks[sink + held :]
            out.append(table[..., sink + newest :])
        work["count"][:, :, :tiles] = read
        return out

    def finish_choice(self) -> None:
        """Write what tiles read once every fetched block is resident, and count."""
        assert self.choice is not None
        mass, wanted, first, tables, offset, passes = self.choice
        self.choice = None
        own, work = self.tensors, self.work
        fetched = sum((work[name] >= 0).sum() for name in ("now", "later"))
        if wanted is None:  # tiles want what is resident, so none is denied
            tiles = mass.shape[1] // first.shape[1] * mass.shape[2]
            late = (work["later"] >= 0).sum() * tiles
            self._count(first.numel() * tiles * passes, late, 0, fetched)
            return
        best_slots(mass, own["block"], tables[1], offset)
        wanted = wanted.unflatten(1, (first.shape[1], -1)).flatten(2)
        slot = self.slot_of.gather(2, wanted)
        resident = slot >= 0
        # late: in the first pass another block, or none, was in its slot
        late = resident & (first.gather(2, slot.long().clamp(min=0)) != wanted)
        self._count(wanted.numel() * passes, late.sum(), (~resident).sum() * passes, fetched)

    def _count(self, *values: int | Tensor) -> None:
        for i, value in enumerate(values):
            self.work["counters"][i] += value
