"""A layer's past offloaded to host memory, block by block, with an LRU of resident blocks.

The life of an entry in `cache=bank`. A pass writes it behind the past (`store/kv.py`), where it
stays among the newest. When it leaves these, `BlockBank.seal` orders it with others by a hash of
its key, cuts them into blocks, copies these to host memory (`kernels/host_blocks`; int8 or int4 by
`host=`) and gives each a code in the index (`kernels/block_index`); a block never changes after. In
a chunk's first pass `attention/ann.py` scores the codes of all blocks, and `store/residents.py`
chooses which are resident: those of most attention mass, a resident one's counted twice
(hysteresis), then the least recently wanted leave first (LRU; `kernels/admit`). The first pass
waits for the blocks of most mass (`fetch`), the others are prefetched beside it (`prefetch`) for
the chunk's other passes, which read them from their resident slots like any cache
(`kernels/block_sparse`). When host memory is full, a new block replaces the one that is most like
an older block. `store/bank_layout.py` has the sizes and tensors, `store/host_bank.py` snapshots,
`store/coded_bank.py` resident blocks of float8, and `store/frame_bank.py` the bank of whole latent
frames that `attention=pose` and `attention=similar` read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
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
from tachyscope.store.residents import ResidentBlocks

if TYPE_CHECKING:
    from tachyscope.store.kv import KVStore
    from tachyscope.store.layer_pass import LayerPass

# a newly sealed block gets the highest LRU stamp of its chunk: chosen ones get 0.99 at most
SEALED = 0.999


@dataclass(slots=True)
class BlockBank(ResidentBlocks, HostBank):
    """The blocks of one layer.

    tensors, beside those of `HostBank` (the names are those of snapshots):
      code, scale, weight  the index, as `encode_blocks` writes it: rows of the sink's blocks, the
                           bank's and the newest's (these right behind while all are resident)
      log_count  [B, Hkv, cache slots]    log-weights: 0, the layout's in sealed blocks, -inf: empty
      length     [B, Hkv, capacity]       entries of a block
      place      [B, Hkv, capacity + 1]   `slot_of` a block, -1: not resident; last: padding
      block      [B, Hkv, resident slots] the block in a resident slot, -1: none
      wanted     [B, Hkv, capacity]       LRU stamp: the last choice that wanted it + its share
      alike      [B, Hkv, capacity]       largest cosine with a block older than it, less GIVEN if
                                          it was given; UNUSED: never written
      norm       [B, Hkv, capacity]       the norm of its code
      choices    number of choices so far
      given      given entries that are not sealed, the sink's among them
    work:
      now, later  [B, Hkv, resident slots]  block to fetch, or to prefetch, to a slot; -1: none
      first, map  [B, H, tiles, n]          block tables of the first pass, and of later ones
      count       [B, H, tiles]             blocks that a tile reads
    pending: recorded behind the copies in flight
    """

    host: dict[str, Tensor] = field(default_factory=dict)
    pending: torch.cuda.Event | None = None

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
        """A bank without blocks, in new host memory or in that of a bank that is no longer used."""
        # cached, so that the first chunk need not make them
        if layout.order_bits:
            planes(layout.order_bits, shape.head_dim, device)
        if layout.code_dtype.is_floating_point:
            planes(layout.code_width, shape.head_dim, device)
        size = (shape.batch, shape.kv_heads, layout.capacity, layout.block)
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
        for name, x in self.tensors.items():
            if name != "sealed":
                x.fill_(START.get(name, 0))

    def rewind(self, layer: KVStore, past: int) -> None:
        if past > self.layout.first:
            raise TachyscopeError(
                f"a bank's blocks are sealed: of its past the first {self.layout.first} entries "
                f"can be kept, got {past}: keep fewer, or raise attention's sink"
            )
        self.wait_for_copies()
        self.clear()
        self._encode_sink_and_newest(layer, past, 0, 0)

    def ranges(self) -> dict[str, tuple[int, int]]:
        layout, capacity = self.layout, self.layout.capacity
        return {
            "bank.length": (0, layout.block),
            "bank.place": (-1, layout.resident_slots - 1),
            "bank.block": (-1, capacity - 1),
            "bank.used": (0, capacity),
            "bank.given": (0, 2**31 - 1),
            "bank.sealed": (0, 2**31 - 1),
            "bank.written": (0, 2**31 - 1),
        }

    # ---- a commit

    def seal(self, p: LayerPass, n: int) -> int:
        layer, past = p.layer, p.ctx.past
        self.wait_for_copies()
        if p.ctx.given:
            self.tensors["given"] += n
        layout, size = self.layout, self.layout.block
        held = layout.resident_blocks(past)
        start = layout.first + held * size
        row = start - layout.coded_entries(past)  # of the layer's k and v
        piece = past + n - start - layout.newest  # entries to seal
        if piece <= 0:
            self._encode_sink_and_newest(layer, past + n, 0, past)
            return past + n
        count, more = -(-piece // size), piece + layout.newest
        order = self._order(layer, slice(row, row + piece))
        taken = {name: getattr(layer, name)[:, :, row : row + more] for name in ("k", "v")}
        taken = {name: x.clone() for name, x in taken.items()}
        # padding repeats the last entry, so that it does not widen the range of int4 codes
        if part := -piece % size:
            order = torch.cat([order, order[:, :, -1:].expand(-1, -1, part)], 2)
        entries = {name: take(x[:, :, :piece], order) for name, x in taken.items()}
        full = held + count >= layout.resident_slots
        rows = (*order.shape[:2], count * size)
        live = torch.full(rows, layout.log_weight, dtype=torch.float32, device=order.device)
        live[:, :, piece:] = -math.inf
        ids = self._assign_ids(entries["k"][:, :, :piece], live, count)
        # given entries come first in a video, so they are sealed first
        self.tensors["given"].sub_(piece).clamp_(min=0)
        slots = self._make_resident(layer, entries, live, ids, held, full)
        with self._on_copy_stream(ids, slots):
            store_blocks(*self._resident_kv(layer), slots, self.host_blocks, ids)
        end = layout.first + min(held + count, layout.resident_slots) * size
        row = end - layout.coded_entries(end + layout.newest)
        for name, x in taken.items():
            getattr(layer, name)[:, :, row : row + layout.newest] = x[:, :, piece:]
        self.tensors["log_count"][:, :, end:] = 0.0
        self.tensors["log_count"][:, :, end + layout.newest :] = -math.inf
        if full and held < layout.resident_slots:  # the newest's codes move to the last rows
            self.tensors["weight"][:, :, layout.sink + held + count :] = LOWEST
        in_use = layout.capacity if full else held + count
        self._encode_sink_and_newest(layer, end + layout.newest, in_use, past)
        shape = p.ctx.shape
        hashed = piece * shape.head_dim * layout.order_bits
        work = hashed + count * layout.capacity * layout.code_width
        p.work.macs += shape.batch * shape.kv_heads * work
        return end + layout.newest

    def _order(self, layer: KVStore, slots: slice) -> Tensor:
        """The order [B, Hkv, n] in which entries are cut into blocks: by hash bucket, or time."""
        bits = self.layout.order_bits
        if not bits:
            order = torch.arange(slots.stop - slots.start, device=layer.k.device)
            return order.expand(*layer.k.shape[:2], -1)
        return order_of(buckets(layer.directions("k", slots), bits), 2**bits)

    def _assign_ids(self, k: Tensor, live: Tensor, count: int) -> Tensor:
        """Ids [B, Hkv, count] for new blocks of keys k, their codes written: unused ids, or in a
        full bank those of the blocks most like an older one, given blocks last."""
        layout, own = self.layout, self.tensors
        new = self._encode(k, live)
        used, alike = own["used"], own["alike"]
        fresh = used + torch.arange(count, dtype=torch.int32, device=used.device)
        newest = own["written"] > own["sealed"] - layout.capacity // NEWEST
        leave = alike.masked_fill(newest, -math.inf).topk(count, -1).indices.to(torch.int32)
        ids = torch.where(used + count <= layout.capacity, fresh, leave).contiguous()
        used.copy_((used + count).clamp(max=layout.capacity))
        own["sealed"] += count
        own["written"].scatter_(2, ids.long(), own["sealed"].expand(ids.shape))
        # the resident slot of a block that leaves is free
        freed = self.slot_of.gather(2, ids.long())
        keep = F.pad(own["block"], (0, 1)).scatter(2, or_last(freed, layout.resident_slots), -1)
        own["block"].copy_(keep[:, :, :-1])
        self.slot_of.scatter_(2, ids.long(), -1)
        sealed = slice(layout.sink, layout.sink + layout.capacity)
        # codes are whole numbers that float16 represents exactly
        dtype = torch.float16 if k.is_cuda else torch.float32
        norm = new.code.float().norm(dim=-1, keepdim=True).clamp(min=1e-12)
        dots = own["code"][:, :, sealed].to(dtype) @ (new.code / norm).to(dtype).mT
        # compared with older blocks alone: so the first view of a scene stays
        older = (alike < UNUSED).scatter(2, ids.long(), False).unsqueeze(-1)
        cosine = (dots.float() / own["norm"].unsqueeze(-1)).where(older, -1.0).amax(2)
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

    def _make_resident(
        self, layer: KVStore, entries: Mapping[str, Tensor], live: Tensor, ids: Tensor, held: int,
        full: bool,
    ) -> Tensor:  # fmt: skip
        """Write new blocks to resident slots [B, Hkv, count]: free ones, then the least recently
        wanted."""
        layout, own, count = self.layout, self.tensors, ids.shape[2]
        if full:
            wanted = at_or(own["wanted"], own["block"], -1.0)
            to = wanted.topk(count, -1, largest=False).indices
            left = or_last(own["block"].gather(2, to), layout.capacity)
            self.slot_of.scatter_(2, left, -1)
        else:
            to = torch.arange(held, held + count, device=ids.device).expand(ids.shape)
        own["block"].scatter_(2, to, ids)
        slots = to.to(torch.int32)
        self.slot_of.scatter_(2, ids.long(), slots)
        rows = to.unsqueeze(-1) * layout.block + torch.arange(layout.block, device=to.device)
        own["log_count"].scatter_(2, rows.flatten(2) + layout.first, live)
        number = torch.arange(count, dtype=torch.int32, device=to.device).expand(ids.shape)
        source = torch.full_like(own["block"], -1).scatter_(2, to, number)
        load_blocks(self._as_blocks(entries, live, ids, held), source, *self._resident_kv(layer))
        self._load_scales(own["block"])
        return slots

    def _as_blocks(
        self, entries: Mapping[str, Tensor], live: Tensor, ids: Tensor, held: int
    ) -> HostBlocks:
        """Entries k and v in the form of host memory, for ids [B, Hkv, n]; `held` were before."""
        return HostBlocks(**{x: y.unflatten(2, (ids.shape[2], -1)) for x, y in entries.items()})

    def _load_scales(self, ids: Tensor) -> None:
        """Copy the scales of blocks ids [B, Hkv, resident slots], where blocks have any."""

    def _encode(self, k: Tensor, live: Tensor) -> Codes:
        """Codes of the blocks that keys [B, Hkv, n, D] fill."""
        layout = self.layout
        rows = (*live.shape[:2], live.shape[2] // layout.block)
        new = Codes(
            live.new_zeros(*rows, layout.code_width, dtype=layout.code_dtype),
            live.new_zeros(*rows, 1),
            live.new_zeros(rows),
        )
        encode_blocks(Past(k, k), live, layout.block, new)
        return new

    def _encode_sink_and_newest(self, layer: KVStore, past: int, blocks: int, before: int) -> None:
        """Write the codes of the newest behind `blocks` of the bank, and the sink's while it fills:
        `before` slots were filled so far."""
        layout = self.layout
        sink, held, newest = layout.blocks(past)
        start = layout.first + held * layout.block
        coded = layout.coded_entries(past)
        parts = [(layout.sink + blocks, start - coded, past - coded, newest)]
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
        """Copy the blocks that the first pass waits for to their resident slots."""
        self._load(layer, self.work["now"])

    def prefetch(self, layer: KVStore) -> None:
        """Copy the other chosen blocks beside what is launched next, until `wait_for_copies`."""
        assert self.choice is not None
        used = [x for x in self.choice if isinstance(x, Tensor)]
        with self._on_copy_stream(*used):
            self.finish_choice()
            self._load(layer, self.work["later"])

    def _load(self, layer: KVStore, ids: Tensor) -> None:
        """Copy blocks [B, Hkv, resident slots] to their slots; a slot of id -1 keeps its block."""
        layout, own = self.layout, self.tensors
        load_blocks(self.host_blocks, ids, *self._resident_kv(layer))
        self._load_scales(ids)
        if layout.blocks_full:
            return
        length = at_or(own["length"], ids, 0).unsqueeze(-1)
        padding = torch.arange(layout.block, device=ids.device) >= length
        held = own["log_count"][:, :, self._resident_span]
        live = torch.full_like(held, layout.log_weight).masked_fill(padding.flatten(2), -math.inf)
        loaded = (ids >= 0).repeat_interleave(layout.block, 2)
        held.copy_(torch.where(loaded, live, held))

    @contextmanager
    def _on_copy_stream(self, *used: Tensor) -> Iterator[None]:
        """Launch the copies inside on a stream of their own, behind all launched so far.

        The memory of the tensors `used` there is not given back before they are done.
        """
        device = self.tensors["block"].device
        if device.type != "cuda":
            yield
            return
        stream = _copy_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        for x in used:
            x.record_stream(stream)
        with torch.cuda.stream(stream):
            yield
            self.pending = stream.record_event()

    def wait_for_copies(self) -> None:
        if self.pending is not None:
            torch.cuda.current_stream(self.tensors["block"].device).wait_event(self.pending)
            self.pending = None

    @property
    def _resident_span(self) -> slice:
        """The cache slots of the resident slots."""
        layout = self.layout
        return slice(layout.first, layout.first + layout.resident_slots * layout.block)

    def _resident_kv(self, layer: KVStore) -> tuple[Tensor, Tensor]:
        """Keys and values of the resident slots."""
        return layer.k[:, :, self._resident_span], layer.v[:, :, self._resident_span]

    def table(
        self, layer: KVStore, past: int, read: int, first: bool, weighs: bool = True
    ) -> BlockTable:
        """The `read` blocks of each tile in the `first` pass, before `prefetch`, or in later ones;
        `weighs`: with the log-weight of sealed blocks."""
        layout, kept, log_count = self.layout, layer.past(past), self.tensors["log_count"]
        if layout.log_weight and not weighs:
            log_count = self.unweighted(past)
        if not first:
            self.wait_for_copies()
        ids = self.work["first" if first and past == layout.room else "map"][..., :read]
        return BlockTable(
            kept.k, kept.v, log_count, ids, self.work["count"], layout.tile, layout.block,
            plain=layout.blocks_full and not (layout.log_weight and weighs),
        )  # fmt: skip

    def unweighted(self, past: int) -> Tensor:
        """The log-weights with those of sealed blocks taken off."""
        log_count = self.tensors["log_count"].clone()
        log_count[:, :, self.layout.sealed(past)] -= self.layout.log_weight
        return log_count


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all layers: a bus copies one thing after the other."""
    return torch.cuda.Stream(device, priority=-1)
