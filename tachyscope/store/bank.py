"""A layer's past offloaded to host memory, block by block, and which blocks are resident.

A layer of `cache=bank` has four runs of slots: the sink, `places` of a block each, the newest
entries, and behind them the present chunk. Entries that leave the newest are ordered by their hash,
cut into blocks and sealed: written to host memory and put in places. Nothing changes or moves a
sealed block there. The index knows every block by a code, so that queries choose among all of them.

The choice is made in a chunk's first pass. Blocks that are wanted and not resident are fetched into
places of the least recently wanted (LRU): those of most mass at once, the others prefetched while
the pass goes on, for the chunk's other passes. Where more is wanted than there are places, the
largest mass wins.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.types import Shape
from tachyscope.kernels.block_index import LOWEST, Codes, buckets, encode_blocks
from tachyscope.kernels.block_table import BlockTable
from tachyscope.kernels.codes import Past
from tachyscope.kernels.entries import at_or, or_last, take
from tachyscope.kernels.hashing import order_of, planes
from tachyscope.kernels.host_blocks import HostBlocks, load_blocks, store_blocks
from tachyscope.store.bank_layout import (
    GIVEN,
    NEWEST,
    START,
    UNUSED,
    BankLayout,
    device_tensors,
    host_tensors,
    work_tensors,
)
from tachyscope.store.host_bank import HostBank
from tachyscope.store.residents import Residents

if TYPE_CHECKING:
    from tachyscope.store.kv import KVStore
    from tachyscope.store.layer_pass import LayerPass

# a block that is sealed counts as wanted in its chunk, more than any that was chosen
SEALED = 0.999


@dataclass(slots=True)
class BlockBank(Residents, HostBank):
    """Blocks of one layer, on the host and by index.

    tensors, on the device:
      code, scale, weight  of blocks, as `encode_blocks` writes them: the sink's, those of the bank,
                           the newest's; while all are resident the newest's follow the last one
      log_count  [B, Hkv, slots]   0, in sealed blocks the layout's log_weight, -inf where a block
                                   has no entry
      length     [B, Hkv, most]    entries of a block
      place      [B, Hkv, most + 1]  where a block stands, -1 for nowhere; the last is no block
      block      [B, Hkv, places]  which block stands there, -1 for none
      wanted     [B, Hkv, most]    when it was last wanted: the choice's number, and by how much
      alike      [B, Hkv, most]    its largest cosine with an older block, of what was given GIVEN
                                   less; UNUSED: never written
      norm       [B, Hkv, most]    its code's
      written    [B, Hkv, most]    how many blocks had been sealed when it was, it counted
      choices, sealed, used        choices made, blocks sealed, and those that are in use
      given                        given entries that are not sealed, the sink's among them
    host: k and v of blocks, as they are or as codes with scales
    work, no state: tables of the present choice, what is fetched, counts since they were last read
    pending: after it the copies that were asked for are done
    """

    host: dict[str, Tensor] = field(default_factory=dict)
    pending: torch.cuda.Event | None = None  # copies under way

    @classmethod
    def empty(
        cls,
        layout: BankLayout,
        shape: Shape,
        host: str,
        dtype: torch.dtype,
        device: torch.device,
        memory: dict[str, Tensor] | None = None,
    ) -> BlockBank:
        """No blocks, in new host memory, or in that of a bank which has none either."""
        # made now, not in the first chunk
        if layout.order_bits:
            planes(layout.order_bits, shape.head_dim, device)
        if layout.code_dtype.is_floating_point:
            planes(layout.code, shape.head_dim, device)
        size = (shape.batch, shape.kv_heads, layout.most, layout.block)
        dtype = torch.uint8 if layout.coded else dtype
        return cls(
            layout,
            device_tensors(layout, shape, device),
            work_tensors(layout, shape, device),
            memory or host_tensors(size, shape.head_dim, host, dtype, device),
        )

    @property
    def codes(self) -> Codes:
        return Codes(*(self.tensors[name] for name in ("code", "scale", "weight")))

    def clear(self) -> None:
        """Drop every block."""
        for name, x in self.tensors.items():
            if name != "sealed":
                x.fill_(START.get(name, 0))

    def rewind(self, layer: KVStore, past: int) -> None:
        """Drop every block but the sink's, of which `past` slots are kept."""
        if past > self.layout.first:
            raise TachyscopeError(
                f"a bank's blocks are sealed: of its past the first {self.layout.first} entries "
                f"can be kept, got {past}: keep fewer, or raise attention's sink"
            )
        self.join(layer)
        self.clear()
        self._encode_ends(layer, past, 0, 0)

    def ranges(self) -> dict[str, tuple[int, int]]:
        """The least and the greatest whole number of a tensor, by name."""
        layout, most = self.layout, self.layout.most
        return {
            "bank.length": (0, layout.block),
            "bank.place": (-1, layout.places - 1),
            "bank.block": (-1, most - 1),
            "bank.used": (0, most),
            "bank.given": (0, 2**31 - 1),
            "bank.sealed": (0, 2**31 - 1),
            "bank.written": (0, 2**31 - 1),
        }

    # ---- a commit

    def seal(self, p: LayerPass, n: int) -> int:
        layer, past = p.layer, p.ctx.past
        self.join(layer)
        if p.ctx.given:
            self.tensors["given"] += n
        layout, size = self.layout, self.layout.block
        held = layout.resident(past)
        start = layout.first + held * size
        row = start - layout.apart(past)  # of the layer's k and v
        piece = past + n - start - layout.newest
        if piece <= 0:
            self._encode_ends(layer, past + n, 0, past)
            return past + n
        count, more = -(-piece // size), piece + layout.newest
        order = self._order(layer, slice(row, row + piece))
        taken = {name: getattr(layer, name)[:, :, row : row + more] for name in ("k", "v")}
        taken = {name: x.clone() for name, x in taken.items()}
        # what fills the last block up is like its last entry, so that codes of int4 stay as fine
        if part := -piece % size:
            order = torch.cat([order, order[:, :, -1:].expand(-1, -1, part)], 2)
        entries = {name: take(x[:, :, :piece], order) for name, x in taken.items()}
        full = held + count >= layout.places
        rows = (*order.shape[:2], count * size)
        live = torch.full(rows, layout.log_weight, dtype=torch.float32, device=order.device)
        live[:, :, piece:] = -math.inf
        ids = self._number(entries["k"][:, :, :piece], live, count)
        # given entries come first, so that those are sealed first
        self.tensors["given"].sub_(piece).clamp_(min=0)
        places = self._put(layer, entries, live, ids, held, full)
        with self._beside(layer, ids, places):
            store_blocks(*self._places(layer), places, self.host_blocks, ids)
        end = layout.first + min(held + count, layout.places) * size
        row = end - layout.apart(end + layout.newest)
        for name, x in taken.items():
            getattr(layer, name)[:, :, row : row + layout.newest] = x[:, :, piece:]
        self.tensors["log_count"][:, :, end:] = 0.0
        self.tensors["log_count"][:, :, end + layout.newest :] = -math.inf
        if full and held < layout.places:  # the newest's codes go to the end
            self.tensors["weight"][:, :, layout.sink + held + count :] = LOWEST
        in_use = layout.most if full else held + count
        self._encode_ends(layer, end + layout.newest, in_use, past)
        shape = p.ctx.shape
        work = piece * shape.head_dim * layout.order_bits + count * layout.most * layout.code
        p.work.macs += shape.batch * shape.kv_heads * work
        return end + layout.newest

    def _order(self, layer: KVStore, slots: slice) -> Tensor:
        bits = self.layout.order_bits
        if not bits:
            order = torch.arange(slots.stop - slots.start, device=layer.k.device)
            return order.expand(*layer.k.shape[:2], -1)
        return order_of(buckets(layer.directions("k", slots), bits), 2**bits)

    def _number(self, k: Tensor, live: Tensor, count: int) -> Tensor:
        """The blocks [B, Hkv, count] that entries become, their codes written: new ones, or when
        all are in use those that leave: of two alike the newer, what was given last of all."""
        layout, own = self.layout, self.tensors
        new = self._encode(k, live)
        used, alike = own["used"], own["alike"]
        fresh = used + torch.arange(count, dtype=torch.int32, device=used.device)
        newest = own["written"] > own["sealed"] - layout.most // NEWEST
        leave = alike.masked_fill(newest, -math.inf).topk(count, -1).indices.to(torch.int32)
        ids = torch.where(used + count <= layout.most, fresh, leave).contiguous()
        used.copy_((used + count).clamp(max=layout.most))
        own["sealed"] += count
        own["written"].scatter_(2, ids.long(), own["sealed"].expand(ids.shape))
        # a block that leaves leaves its place too
        gone = own["place"].gather(2, ids.long())
        keep = F.pad(own["block"], (0, 1)).scatter(2, or_last(gone, layout.places), -1)
        own["block"].copy_(keep[:, :, :-1])
        own["place"].scatter_(2, ids.long(), -1)
        sealed = slice(layout.sink, layout.sink + layout.most)
        # codes are whole numbers that float16 holds
        kind = torch.float16 if k.is_cuda else torch.float32
        norm = new.code.float().norm(dim=-1, keepdim=True).clamp(min=1e-12)
        dots = own["code"][:, :, sealed].to(kind) @ (new.code / norm).to(kind).mT
        # a first view stays, what is like it will leave
        there = (alike < UNUSED).scatter(2, ids.long(), False).unsqueeze(-1)
        cosine = (dots.float() / own["norm"].unsqueeze(-1)).where(there, -1.0).amax(2)
        cosine -= GIVEN * (own["given"] > layout.first)
        own["alike"].scatter_(2, ids.long(), cosine)
        own["norm"].scatter_(2, ids.long(), norm.squeeze(-1))
        for x, y in zip(self.codes, new, strict=True):
            rows = x[:, :, sealed]
            index = ids.long() if x.dim() == 3 else ids.long().unsqueeze(-1).expand_as(y)
            rows.scatter_(2, index, y)
        length = (live > -math.inf).unflatten(2, (count, -1)).sum(-1, dtype=torch.int32)
        own["length"].scatter_(2, ids.long(), length)
        stamp = (own["choices"] + SEALED).expand(ids.shape)
        own["wanted"].scatter_(2, ids.long(), stamp)
        return ids

    def _put(
        self, layer: KVStore, entries: Mapping[str, Tensor], live: Tensor, ids: Tensor, held: int,
        full: bool,
    ) -> Tensor:  # fmt: skip
        """Let sealed blocks stand in places [B, Hkv, count], free ones or the least recently
        wanted."""
        layout, own, count = self.layout, self.tensors, ids.shape[2]
        if full:
            wanted = at_or(own["wanted"], own["block"], -1.0)
            to = wanted.topk(count, -1, largest=False).indices
            left = or_last(own["block"].gather(2, to), layout.most)
            own["place"].scatter_(2, left, -1)
        else:
            to = torch.arange(held, held + count, device=ids.device).expand(ids.shape)
        own["block"].scatter_(2, to, ids)
        places = to.to(torch.int32)
        own["place"].scatter_(2, ids.long(), places)
        slots = to.unsqueeze(-1) * layout.block + torch.arange(layout.block, device=to.device)
        slots = slots.flatten(2) + layout.first
        own["log_count"].scatter_(2, slots, live)
        number = torch.arange(count, dtype=torch.int32, device=to.device).expand(ids.shape)
        comes = torch.full_like(own["block"], -1).scatter_(2, to, number)
        load_blocks(self._blocks(entries, live, ids, held), comes, *self._places(layer))
        self._scale(own["block"])
        return places

    def _blocks(
        self, entries: Mapping[str, Tensor], live: Tensor, ids: Tensor, held: int
    ) -> HostBlocks:
        """Entries as blocks ids [B, Hkv, n], of which `held` stand in places already."""
        return HostBlocks(**{x: y.unflatten(2, (ids.shape[2], -1)) for x, y in entries.items()})

    def _scale(self, ids: Tensor) -> None:
        """Blocks ids [B, Hkv, places] have come: note their scales, if they have any."""

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
        apart = layout.apart(past)
        parts = [(layout.sink + sealed, start - apart, past - apart, newest)]
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

    def fetch(self, layer: KVStore) -> None:
        """Bring from host memory what the first pass waits for."""
        self._load(layer, self.work["now"])

    def fetch_later(self, layer: KVStore) -> None:
        """Bring the rest that was chosen, beside what is launched next; `join` waits for it."""
        assert self.choice is not None
        used = [x for x in self.choice if isinstance(x, Tensor)]
        with self._beside(layer, *used):
            self.settle()
            self._load(layer, self.work["later"])

    def _load(self, layer: KVStore, ids: Tensor) -> None:
        """Copy blocks [B, Hkv, places] to places; none where an id is below 0."""
        layout, own = self.layout, self.tensors
        load_blocks(self.host_blocks, ids, *self._places(layer))
        self._scale(ids)
        if layout.whole:
            return
        length = at_or(own["length"], ids, 0).unsqueeze(-1)
        beyond = torch.arange(layout.block, device=ids.device) >= length
        held = own["log_count"][:, :, self._slots]
        live = torch.full_like(held, layout.log_weight).masked_fill(beyond.flatten(2), -math.inf)
        comes = (ids >= 0).repeat_interleave(layout.block, 2)
        held.copy_(torch.where(comes, live, held))

    @contextmanager
    def _beside(self, layer: KVStore, *used: Tensor) -> Iterator[None]:
        """What is launched inside runs on a stream of its own, after all that was launched.

        Of what it uses the memory of `used` would else be free too early.
        """
        if not layer.k.is_cuda:
            yield
            return
        stream = _copy_stream(layer.k.device)
        stream.wait_stream(torch.cuda.current_stream(layer.k.device))
        for x in used:
            x.record_stream(stream)
        with torch.cuda.stream(stream):
            yield
            self.pending = stream.record_event()

    def join(self, layer: KVStore) -> None:
        if self.pending is not None:
            torch.cuda.current_stream(layer.k.device).wait_event(self.pending)
            self.pending = None

    @property
    def _slots(self) -> slice:
        layout = self.layout
        return slice(layout.first, layout.first + layout.places * layout.block)

    def _places(self, layer: KVStore) -> tuple[Tensor, Tensor]:
        return layer.k[:, :, self._slots], layer.v[:, :, self._slots]

    def table(
        self, layer: KVStore, past: int, read: int, first: bool, weighs: bool = True
    ) -> BlockTable:
        """What tiles read; `first` is for the pass before `fetch_later`, `weighs` for one that
        weighs sealed blocks."""
        layout, kept, log_count = self.layout, layer.past(past), self.tensors["log_count"]
        if layout.log_weight and not weighs:
            log_count = self.unweighed(past)
        if not first:
            self.join(layer)
        ids = self.work["first" if first and past == layout.room else "map"][..., :read]
        return BlockTable(
            kept.k, kept.v, log_count, ids, self.work["count"], layout.tile, layout.block,
            plain=layout.whole and not (layout.log_weight and weighs),
        )  # fmt: skip

    def unweighed(self, past: int) -> Tensor:
        """Log-weights of slots where sealed blocks weigh 1."""
        log_count = self.tensors["log_count"].clone()
        log_count[:, :, self.layout.sealed(past)] -= self.layout.log_weight
        return log_count


def sum_counters(banks: Sequence[HostBank]) -> tuple[Tensor, ...]:
    """What the layers' banks have counted, by COUNTERS; they begin anew."""
    counters = [bank.work["counters"] for bank in banks]
    total = torch.stack(counters).sum(0)
    for x in counters:
        x.zero_()
    return total.unbind()


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all layers: copies go one after the other, as the bus takes them."""
    return torch.cuda.Stream(device, priority=-1)
