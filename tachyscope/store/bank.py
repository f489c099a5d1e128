"""A layer's past in host memory, block by block, and which of the blocks are resident.

A layer of `cache=bank` has four runs of slots: the sink, `places` of a block each, the newest
entries, and behind them the present chunk. Entries that leave the newest are ordered by their hash,
cut into blocks and sealed: written to host memory and put in places. Nothing changes or moves a
sealed block there. The index knows every block by a code, so that queries choose among all of them.

The choice is made in a chunk's first pass. A layer whose tiles have read what was resident then
fetches the blocks that are wanted and are not, into places of the least recently wanted, while the
pass goes on; the chunk's other passes read them. Where more is wanted than there are
places, the largest mass wins.

Nothing here looks at data: on a GPU no launch depends on it, so that chunks can be recorded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tachyscope.kernels.block_index import Codes, buckets, encode_blocks
from tachyscope.kernels.block_table import BlockTable
from tachyscope.kernels.codes import Past
from tachyscope.kernels.codes.torch import int4_groups
from tachyscope.kernels.hashing import order_of, planes
from tachyscope.kernels.host_blocks import HostBlocks, load_blocks, store_blocks
from tachyscope.kernels.merge import take
from tachyscope.store.host_memory import host_zeros
from tachyscope.types import Shape

if TYPE_CHECKING:
    from tachyscope.store.kv import KVStore

# what host memory holds a channel as
HOST = {"native": None, "int8": torch.int8, "int4": torch.uint8}
LOWEST = -1e30  # the weight of a block without entries
UNUSED = 2.0  # over any cosine: a block that was never written is the first to be
# a block that is sealed counts as wanted in its chunk, more than any that was chosen
SEALED = 0.999
COUNTERS = ("blocks_wanted", "blocks_late", "blocks_denied", "blocks_fetched")


class BankLayout(NamedTuple):
    """How a layer's slots and its bank are cut up, in blocks but for `newest`."""

    block: int  # entries
    sink: int  # the first entries, always resident
    places: int  # what is resident beside
    newest: int  # entries that are not sealed yet, always resident
    most: int  # what the bank holds
    tile: int  # queries that read the same blocks
    order_bits: int  # signs by which entries are ordered before they are cut into blocks
    code: int  # numbers of a block's code
    code_dtype: torch.dtype
    whole: bool  # whether every block is full

    @property
    def open(self) -> int:
        """Blocks that the newest entries fill."""
        return -(-self.newest // self.block)

    @property
    def first(self) -> int:
        """The slot of the first place."""
        return self.sink * self.block

    @property
    def room(self) -> int:
        """Slots of a full past."""
        return self.first + self.places * self.block + self.newest

    def resident(self, past: int) -> int:
        """Blocks that stand in places when the past takes so many slots."""
        return max(0, past - self.first - self.newest) // self.block

    def blocks(self, past: int) -> tuple[int, int, int]:
        """Blocks of the sink, of places and of the newest that so many slots fill."""
        held = self.resident(past)
        rest = max(0, past - self.first - held * self.block)
        return -(-min(past, self.first) // self.block), held, -(-rest // self.block)


@dataclass(slots=True)
class BlockBank:
    """Blocks of one layer, on the host and by index.

    tensors, on the device:
      code, scale, weight  of blocks, as `encode_blocks` writes them: the sink's, those of the bank,
                           the newest's; while all are resident the newest's follow the last one
      log_count  [B, Hkv, slots]   0, or -inf where a block has no entry
      length     [B, Hkv, most]    entries of a block
      place      [B, Hkv, most + 1]  where a block stands, -1 for nowhere; the last is no block
      block      [B, Hkv, places]  which block stands there, -1 for none
      wanted     [B, Hkv, most]    when it was last wanted: the choice's number, and by how much
      alike      [B, Hkv, most]    its largest cosine with a newer block; UNUSED: never written
      choices, used                choices made, and blocks written
    host: k and v of blocks, as they are or as codes with scales
    work, no state: tables of the present choice, what is fetched, counts since they were last read
    """

    layout: BankLayout
    tensors: dict[str, Tensor]
    host: dict[str, Tensor]
    work: dict[str, Tensor]

    @classmethod
    def empty(
        cls, layout: BankLayout, shape: Shape, host: str, dtype: torch.dtype, device: torch.device
    ) -> BlockBank:
        # made now, not in the first chunk
        planes(layout.order_bits, shape.head_dim, device)
        if layout.code_dtype.is_floating_point:
            planes(layout.code, shape.head_dim, device)
        batch, heads, most, places = shape.batch, shape.kv_heads, layout.most, layout.places
        rows = (batch, heads, layout.sink + most + layout.open)
        fine: dict[str, Any] = {"dtype": torch.float32, "device": device}
        whole: dict[str, Any] = {"dtype": torch.int32, "device": device}
        slots = -(-layout.room // layout.block) * layout.block
        tensors = {
            "code": torch.zeros(*rows, layout.code, dtype=layout.code_dtype, device=device),
            "scale": torch.zeros(*rows, 1, **fine),
            "weight": torch.full(rows, LOWEST, **fine),
            "log_count": torch.zeros(batch, heads, -(-slots // 4) * 4, **fine),
            "length": torch.zeros(batch, heads, most, **whole),
            "place": torch.full((batch, heads, most + 1), -1, **whole),
            "block": torch.full((batch, heads, places), -1, **whole),
            "wanted": torch.full((batch, heads, most), -1.0, **fine),
            "alike": torch.full((batch, heads, most), UNUSED, **fine),
            "choices": torch.zeros(1, **fine),
            "used": torch.zeros(1, **whole),
        }
        tiles = -(-shape.max_pass_tokens // layout.tile)
        table = (batch, shape.heads, tiles)
        work = {
            "fetched": torch.full((batch, heads, places), -1, **whole),
            "count": torch.zeros(table, **whole),
            "first": torch.zeros(*table, layout.sink + places + layout.open, **whole),
            "map": torch.zeros(*table, layout.sink + places + layout.open, **whole),
            "counters": torch.zeros(len(COUNTERS), dtype=torch.float64, device=device),
        }
        size = (batch, heads, most, layout.block)
        return cls(layout, tensors, _host_tensors(size, shape.head_dim, host, dtype, device), work)

    @property
    def codes(self) -> Codes:
        return Codes(*(self.tensors[name] for name in ("code", "scale", "weight")))

    def clear(self) -> None:
        """Drop every block."""
        start = {"weight": LOWEST, "place": -1, "block": -1, "wanted": -1.0, "alike": UNUSED}
        for name, x in self.tensors.items():
            x.fill_(start.get(name, 0))

    def ranges(self) -> dict[str, tuple[int, int]]:
        """The least and the greatest whole number of a tensor, by name."""
        layout, most = self.layout, self.layout.most
        return {
            "bank.length": (0, layout.block),
            "bank.place": (-1, layout.places - 1),
            "bank.block": (-1, most - 1),
            "bank.used": (0, most),
        }

    # ---- a commit

    def seal(self, layer: KVStore, past: int, n: int) -> tuple[int, int]:
        """Take n entries behind the past into it: its slots after, and how many were sealed."""
        layout, size = self.layout, self.layout.block
        held = layout.resident(past)
        start = layout.first + held * size
        piece = past + n - start - layout.newest
        if piece <= 0:
            self._encode_ends(layer, past + n, 0, past)
            return past + n, 0
        count, more = -(-piece // size), piece + layout.newest
        order = self._order(layer, slice(start, start + piece))
        taken = {name: getattr(layer, name)[:, :, start : start + more] for name in ("k", "v")}
        taken = {name: x.clone() for name, x in taken.items()}
        entries = {name: take(x[:, :, :piece], order) for name, x in taken.items()}
        full = held + count > layout.places
        live = torch.zeros(*order.shape[:2], count * size, dtype=torch.float32, device=order.device)
        live[:, :, piece:] = -math.inf
        ids = self._number(entries["k"], live, count)
        for name, x in entries.items():
            store_blocks(x, self.host_blocks(name), ids)
        self._put(layer, entries, live, ids, held, full)
        end = layout.first + min(held + count, layout.places) * size
        for name, x in taken.items():
            getattr(layer, name)[:, :, end : end + layout.newest] = x[:, :, piece:]
        self.tensors["log_count"][:, :, end:] = 0.0
        self.tensors["log_count"][:, :, end + layout.newest :] = -math.inf
        if full and held < layout.places:  # the newest's codes go to the end
            self.tensors["weight"][:, :, layout.sink + held + count :] = LOWEST
        rows = layout.most if full else held + count
        self._encode_ends(layer, end + layout.newest, rows, past)
        return end + layout.newest, piece

    def _order(self, layer: KVStore, slots: slice) -> Tensor:
        bits = self.layout.order_bits
        return order_of(buckets(layer.directions("k", slots), bits), 2**bits)

    def _number(self, k: Tensor, live: Tensor, count: int) -> Tensor:
        """The blocks [B, Hkv, count] that entries become, their codes written: new ones, or when
        all are in use those of the most alike, which leave."""
        layout, own = self.layout, self.tensors
        new = self._encode(k, live)
        used, alike = own["used"], own["alike"]
        fresh = used + torch.arange(count, dtype=torch.int32, device=used.device)
        leave = alike.topk(count, -1).indices.to(torch.int32)
        ids = torch.where(used + count <= layout.most, fresh, leave).contiguous()
        used.copy_((used + count).clamp(max=layout.most))
        # a block that leaves leaves its place too
        gone = own["place"].gather(2, ids.long())
        keep = F.pad(own["block"], (0, 1)).scatter(2, _or_last(gone, layout.places), -1)
        own["block"].copy_(keep[:, :, :-1])
        own["place"].scatter_(2, ids.long(), -1)
        # the older one of two that are alike will leave
        sealed = slice(layout.sink, layout.sink + layout.most)
        cosine = _directions(own["code"][:, :, sealed]) @ _directions(new.code).mT
        own["alike"].copy_(torch.where(alike == UNUSED, alike, alike.maximum(cosine.amax(-1))))
        own["alike"].scatter_(2, ids.long(), -1.0)
        for x, y in zip(self.codes, new, strict=True):
            rows = x[:, :, sealed]
            index = ids.long() if x.dim() == 3 else ids.long().unsqueeze(-1).expand_as(y)
            rows.scatter_(2, index, y)
        length = (live == 0).unflatten(2, (count, -1)).sum(-1, dtype=torch.int32)
        own["length"].scatter_(2, ids.long(), length)
        stamp = (own["choices"] + SEALED).expand(ids.shape)
        own["wanted"].scatter_(2, ids.long(), stamp)
        return ids

    def _put(
        self, layer: KVStore, entries: Mapping[str, Tensor], live: Tensor, ids: Tensor, held: int,
        full: bool,
    ) -> None:  # fmt: skip
        """Let sealed blocks stand in places: free ones, or those least recently wanted."""
        layout, own = self.layout, self.tensors
        count = min(ids.shape[2], layout.places)
        ids = ids[:, :, ids.shape[2] - count :]
        if full:
            wanted = _at(own["wanted"], own["block"], -1.0)
            to = wanted.topk(count, -1, largest=False).indices
            left = _or_last(own["block"].gather(2, to), layout.most)
            own["place"].scatter_(2, left, -1)
        else:
            to = torch.arange(held, held + count, device=ids.device).expand(ids.shape)
        own["block"].scatter_(2, to, ids)
        own["place"].scatter_(2, ids.long(), to.to(torch.int32))
        slots = to.unsqueeze(-1) * layout.block + torch.arange(layout.block, device=to.device)
        slots = slots.flatten(2) + layout.first
        last = slice(live.shape[2] - count * layout.block, None)
        own["log_count"].scatter_(2, slots, live[:, :, last])
        for name, x in entries.items():
            padded = F.pad(x, (0, 0, 0, live.shape[2] - x.shape[2]))[:, :, last]
            held_by: Tensor = getattr(layer, name)
            held_by.scatter_(2, slots.unsqueeze(-1).expand_as(padded), padded)

    def _encode(self, k: Tensor, live: Tensor) -> Codes:
        """Codes of the blocks that keys [B, Hkv, n, D] fill."""
        layout = self.layout
        rows = (*live.shape[:2], live.shape[2] // layout.block)
        new = Codes(
            live.new_zeros(*rows, layout.code, dtype=layout.code_dtype),
            live.new_zeros(*rows, 1),
            live.new_zeros(rows),
        )
        encode_blocks(Past(k, k), live, layout.block, new)
        return new

    def _encode_ends(self, layer: KVStore, past: int, sealed: int, before: int) -> None:
        """Write the sink's codes while it fills, and the newest's, behind so many of the bank."""
        layout = self.layout
        sink, held, newest = layout.blocks(past)
        start = layout.first + held * layout.block
        parts = [(layout.sink + sealed, start, past, newest)]
        if before < layout.first:
            parts.append((0, 0, min(past, layout.first), sink))
        for row, lo, hi, count in parts:
            if hi <= lo:
                continue
            size = (*layer.k.shape[:2], count * layout.block)
            live = torch.zeros(size, dtype=torch.float32, device=layer.k.device)
            live[:, :, hi - lo :] = -math.inf
            for x, y in zip(self.codes, self._encode(layer.k[:, :, lo:hi], live), strict=True):
                x[:, :, row : row + count] = y

    # ---- a pass

    def choose(self, mass: Tensor, past: int, read: int, late: int, passes: int) -> None:
        """Write which blocks each tile reads, by its mass [B, H, tiles, blocks] on each.

        A tile reads `read` blocks, the sink's and the newest's among them. Of the `passes` that the
        choice is made for the first `late` ones run before `fetch`.
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
        group = mass.shape[1] // own["weight"].shape[1]
        none = (own["length"] == 0).repeat_interleave(group, 1).unsqueeze(2)
        rest = rest.masked_fill(none, -1.0)
        chosen = rest.topk(best, -1, sorted=False)
        before = own["place"].clone()
        # until what is fetched has come, a tile reads the best of what is there
        self._table(rest, maps[0], sink, newest, best)
        self._admit(self._note(chosen.values, chosen.indices))
        self._table(rest, maps[1], sink, newest, best)
        was, is_now = (
            x.repeat_interleave(group, 1).gather(2, chosen.indices.flatten(2)) >= 0
            for x in (before, own["place"])
        )
        missed = (is_now & ~was).sum() * late
        fetched = (work["fetched"] >= 0).sum()
        self._count(chosen.indices.numel() * passes, missed, (~is_now).sum() * passes, fetched)

    def _note(self, mass: Tensor, ids: Tensor) -> Tensor:
        """The summed mass of every block that a tile wants, [B, Hkv, most]; 0 of the others."""
        own, layout = self.tensors, self.layout
        heads = own["wanted"].shape[1]
        index, mass = (x.unflatten(1, (heads, -1)).flatten(2) for x in (ids, mass))
        size = (*own["wanted"].shape[:2], layout.most)
        demand = torch.zeros(size, dtype=torch.float32, device=mass.device)
        demand.scatter_add_(2, index, mass.clamp(min=1e-12))
        share = demand / demand.amax(-1, keepdim=True) * 0.99
        own["wanted"].copy_(torch.where(demand > 0, own["choices"] + share, own["wanted"]))
        return demand

    def _admit(self, demand: Tensor) -> None:
        """Settle which blocks are resident from now on, and which of them are to be fetched.

        All that are wanted, of largest mass first, then those wanted last.
        """
        own, work, layout = self.tensors, self.work, self.layout
        resident = own["place"][:, :, :-1] >= 0
        score = own["wanted"].masked_fill(~(resident | (demand > 0)), -1.0)
        best = score.topk(layout.places, -1)
        ids = best.indices.to(torch.int32)
        comes = (best.values >= 0) & (_at(own["place"], ids, 0) < 0)
        # a block stays unless it is not among the best
        kept = torch.zeros(*score.shape[:2], layout.most + 1, dtype=torch.bool, device=ids.device)
        kept.scatter_(2, best.indices, best.values >= 0)
        stays = (own["block"] >= 0) & _at(kept, own["block"], 0)
        # the i-th that comes gets the i-th place that is free
        order = comes.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        listed = ids.gather(2, order)
        rank = (~stays).long().cumsum(-1) - 1
        gets = ~stays & (rank < comes.sum(-1, keepdim=True))
        fetched = torch.where(gets, listed.gather(2, rank.clamp(min=0)), -1)
        work["fetched"].copy_(fetched)
        own["block"].copy_(torch.where(stays, own["block"], fetched))
        own["place"].fill_(-1)
        places = torch.arange(layout.places, dtype=torch.int32, device=ids.device)
        index = _or_last(own["block"], layout.most)
        own["place"].scatter_(2, index, places.expand_as(index))
        own["place"][:, :, -1] = -1

    def _table(self, mass: Tensor, out: Tensor, sink: int, newest: int, best: int) -> None:
        """Write the places of each tile's best resident blocks; of a full past none is free."""
        blocks = self.tensors["block"]
        group = mass.shape[1] // blocks.shape[1]
        there = blocks.repeat_interleave(group, 1).unsqueeze(2).expand(-1, -1, mass.shape[2], -1)
        found = mass.gather(3, there.long().clamp(min=0)).masked_fill(there < 0, -1.0)
        out[..., sink + newest :] = found.topk(best, -1).indices + sink

    def fetch(self, layer: KVStore) -> None:
        """Bring what was chosen and was not resident from host memory."""
        layout, own, ids = self.layout, self.tensors, self.work["fetched"]
        slots = slice(layout.first, layout.first + layout.places * layout.block)
        for name in ("k", "v"):
            load_blocks(self.host_blocks(name), ids, getattr(layer, name)[:, :, slots])
        length = _at(own["length"], ids, 0).unsqueeze(-1)
        beyond = torch.arange(layout.block, device=ids.device) >= length
        held = own["log_count"][:, :, slots]
        live = torch.zeros_like(held).masked_fill(beyond.flatten(2), -math.inf)
        comes = (ids >= 0).repeat_interleave(layout.block, 2)
        held.copy_(torch.where(comes, live, held))

    def table(self, layer: KVStore, past: int, read: int, first: bool) -> BlockTable:
        """What tiles read; `first` is for passes before `fetch`."""
        layout, kept = self.layout, layer.past(past)
        ids = self.work["first" if first and past == layout.room else "map"][..., :read]
        return BlockTable(
            kept.k, kept.v, self.tensors["log_count"], ids, self.work["count"], layout.tile,
            layout.block, plain=layout.whole,
        )  # fmt: skip

    def host_blocks(self, name: str) -> HostBlocks:
        return HostBlocks(self.host[name], self.host.get(f"{name}_scale"))

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of one head in host memory, keys and values."""
        size: int = sum(x[0, 0, 0].nbytes for x in self.host.values())
        return size

    # ---- counts

    def _count(self, *values: int | Tensor) -> None:
        for i, value in enumerate(values):
            self.work["counters"][i] += value


def sum_counters(banks: Sequence[BlockBank]) -> tuple[Tensor, ...]:
    """What the layers' banks have counted, by COUNTERS; they begin anew."""
    counters = [bank.work["counters"] for bank in banks]
    total = torch.stack(counters).sum(0)
    for x in counters:
        x.zero_()
    return total.unbind()


def _at(x: Tensor, index: Tensor, none: float) -> Tensor:
    """x [B, Hkv, n] at index [B, Hkv, m], and `none` where that is below 0."""
    return x.gather(2, index.long().clamp(min=0)).masked_fill(index < 0, none)


def _or_last(index: Tensor, last: int) -> Tensor:
    """An index, and where it is below 0 the last."""
    return torch.where(index < 0, last, index).long()


def _directions(code: Tensor) -> Tensor:
    return F.normalize(code.float(), dim=-1)


def _host_tensors(
    size: tuple[int, ...], width: int, host: str, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Keys and values of blocks, [B, Hkv, most, block, …]."""
    codes, found = HOST[host], dict[str, Tensor]()
    for name in ("k", "v"):
        channels = width // 2 if host == "int4" else width
        found[name] = host_zeros((*size, channels), codes or dtype, device)
        if codes is not None:
            groups = int4_groups(width) if host == "int4" else 1
            scale = torch.float16 if host == "int4" else torch.float32
            found[f"{name}_scale"] = host_zeros((*size, groups), scale, device)
    return found
