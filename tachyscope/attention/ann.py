"""Read only the nearest entries (AnnSA)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, final

import torch
from torch import Tensor

from tachyscope.attention import count
from tachyscope.attention.blocks import (
    DENSE_LAYERS,
    DENSE_PASSES,
    BlockAttention,
    default_block,
    power_of_two,
    whole_block,
)
from tachyscope.attention.dense import read_all
from tachyscope.errors import TachyscopeError
from tachyscope.kernels.block_index import (
    Codes,
    block_mass,
    buckets,
    encode_blocks,
    entry_mass,
    mean_mass,
)
from tachyscope.kernels.block_sparse import block_sparse_attention
from tachyscope.kernels.hashing import order_of, planes
from tachyscope.meter import Meter
from tachyscope.settings import check_settings, setting
from tachyscope.store import KVStore, Tensors
from tachyscope.store.bank import BlockBank
from tachyscope.store.bank_layout import BankLayout
from tachyscope.types import PassContext, Shape

# sign bits that order the past, so that a block's entries are alike
BUCKET_BITS = 8
# what a tile is of a latent frame unless asked for: on Atrium tiles of 8 lose 1 dB where 64 lose 10
TILE_SHARE = 8


class Blocks(NamedTuple):
    """How a past is cut up: so many blocks of slots in a row, the last of them maybe a part."""

    all: int
    head: int  # the first ones, that hold the prompt or the sink
    tail: int  # the last ones, that hold the newest
    size: int  # slots of a block

    @property
    def always(self) -> int:
        return self.head + self.tail


@final
@dataclass(frozen=True)
class Ann(BlockAttention):
    """Each tile of queries reads the blocks of past entries that it is likely to attend to.

    Between commits the past stands in the order of hash buckets, cut into blocks; a block's code
    (mean signs, or int8 centroid) gives each query an estimate of the block's attention mass, and a
    tile reads the blocks of largest mass: a share `read` of all past blocks (that a bounded cache
    holds when full), or `k` entries, or until `top_p` of the mass. The present chunk is always
    read; `sink` and `newest` latent frames (and a prompt in the cache) stay where they stand, are
    read first and count inside.
    block=1, tile=1 is the paper's per-query form; left out, they are parts of a latent frame.
    The choice is made in a chunk's first sparse pass and kept for its others; a token model
    chooses for every token.
    """

    read: float | None = setting(
        None,
        "Share of the past's blocks that a tile of queries reads, over 0 and at most 1.",
        instead_of=("k", "top_p"),
    )
    k: int | None = setting(
        None, "Past entries that a tile of queries reads.", instead_of=("read", "top_p")
    )
    top_p: float | None = setting(
        None,
        "Share of the estimated attention mass that the blocks a tile reads add up to, over 0 and "
        "at most 1.",
        instead_of=("read", "k"),
    )
    hash: Literal["int8", "lsh"] = setting(
        "int8",
        "Code of a block that queries are scored against: its mean key in 8 bits (int8), or the "
        "signs of random projections of its keys (lsh).",
    )
    bits: int = setting(32, "Random projections of hash=lsh; int8 does not use it.")
    block: int | None = setting(
        None,
        "Past entries that are read or left out together; unless given the largest power of two "
        "within a twelfth of a latent frame, at most 128; in a bank read whole its largest "
        "divisor.",
    )
    tile: int | None = setting(
        None,
        "Queries that read the same blocks; unless given the largest power of two within an eighth "
        "of a latent frame, at most 128; always 1 in token models.",
    )
    sink: int = setting(1, "First latent frames that every tile reads.")
    newest: int = setting(1, "Latest latent frames that every tile reads.")
    dense_passes: float = setting(0.0, DENSE_PASSES)
    dense_layers: float = setting(0.0, DENSE_LAYERS)

    paper: ClassVar[str] = "FAST-AR's AnnSA, arXiv 2602.01801"
    reorders: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if sum(dial is not None for dial in (self.read, self.k, self.top_p)) != 1:
            raise TachyscopeError(
                "attention policy 'ann' takes one of read, k, top_p: try ann:read=0.2"
            )
        check_settings(self, "attention", "ann")

    @property
    def ragged(self) -> bool:
        return self.top_p is not None

    def check(self, shape: Shape, prompt: int, slots: int | None) -> None:
        protected = prompt + (self.sink + self.newest) * shape.tokens_per_frame
        if self.k is not None and self.k < protected:
            raise TachyscopeError(
                f"attention policy 'ann': k={self.k} is below the {protected} entries of prompt, "
                f"sink={self.sink}f and newest={self.newest}f: raise k, or lower sink or newest"
            )
        if self.read is None or slots is None:
            return
        blocks = self._cut(shape, prompt, slots - shape.max_pass_tokens)
        if self.read * blocks.all < blocks.always - 0.5:
            raise TachyscopeError(
                f"attention policy 'ann': read={self.read:g} of {blocks.all} past blocks is less "
                f"than the {blocks.always} of prompt, sink={self.sink}f and newest={self.newest}f: "
                f"raise read to {blocks.always / blocks.all:.2g}, or lower sink or newest"
            )

    def bank_layout(self, shape: Shape, slots: int, budget: int) -> BankLayout:
        """How a bank cuts up a layer of so many slots; raises where they are too few."""
        tokens, size = shape.tokens_per_frame, self._bank_block(shape)
        sink, newest = -(-self.sink * tokens // size), self.newest * tokens
        room = slots - shape.max_pass_tokens
        places, chunk = (room - newest) // size - sink, shape.chunk * tokens
        sealed = -(-chunk // size)  # blocks of a chunk
        if places < sealed:
            least = -(-((sink + sealed) * size + newest + shape.max_pass_tokens) // tokens)
            raise TachyscopeError(
                f"cache policy 'bank': {slots} resident entries have no place for a chunk of "
                f"{shape.chunk}f beside sink={self.sink}f, newest={self.newest}f and the present "
                f"{shape.chunk + shape.rolling_frames}f: raise resident to {least}f or more"
            )
        most = max(-(-budget // chunk) * sealed, places)
        return BankLayout(
            size, sink, places, room - (sink + places) * size, most, self._tile(shape), BUCKET_BITS,
            shape.head_dim if self.hash == "int8" else self.bits,
            torch.int8 if self.hash == "int8" else torch.float32,
            not (tokens % size or room % size),
        )  # fmt: skip

    def _block(self, shape: Shape) -> int:
        return default_block(shape, self.block)

    def _bank_block(self, shape: Shape) -> int:
        """A bank's block. Where all that is resident is read, no list needs a power of two: a
        divisor of a latent frame fills every block, and attention reads without log-weights."""
        if self.read == 1 and self.block is None:
            return whole_block(shape) or self._block(shape)
        return self._block(shape)

    def _cut(self, shape: Shape, prompt: int, past: int) -> Blocks:
        between = self._between(shape, prompt, past)
        size = self._block(shape)
        count, head = -(-past // size), -(-between.start // size)
        tail = count - max(head, between.stop // size) if between.stop < past else 0
        return Blocks(count, head, tail, size)

    def _between(self, shape: Shape, prompt: int, past: int) -> slice:
        sink = min(past, prompt + self.sink * shape.tokens_per_frame)
        return slice(sink, past - min(past - sink, self.newest * shape.tokens_per_frame))

    def tensors(self, shape: Shape, slots: int, device: torch.device) -> Tensors:
        block = (shape.batch, shape.kv_heads, -(-slots // self._block(shape)))
        width, code = shape.head_dim if self.hash == "int8" else self.bits, torch.int8
        if self.hash == "lsh":
            code = torch.float32
            planes(self.bits, shape.head_dim, device)  # made now, not in the first chunk
        planes(BUCKET_BITS, shape.head_dim, device)
        fine: dict[str, Any] = {"dtype": torch.float32, "device": device}
        return {
            **super().tensors(shape, slots, device),
            # whose key and value each slot between sink and newest holds, counted from the sink
            "order": torch.zeros(*block[:2], slots, dtype=torch.int32, device=device),
            "code": torch.zeros(*block, width, dtype=code, device=device),
            "scale": torch.zeros(*block, 1, **fine),
            "weight": torch.zeros(block, **fine),
        }

    def _tile(self, shape: Shape) -> int:
        if shape.token_by_token:
            return 1
        return self.tile or power_of_two(shape.tokens_per_frame // TILE_SHARE)

    def build_index(
        self, layer: KVStore, ctx: PassContext, past: int, meter: Meter, kept: int = 0
    ) -> None:
        """Order what lies between sink and newest by bucket; note each block's code and weight.

        Behind entries that stay as they were indexed, only what is new there is ordered: a cache
        that appends pays for a chunk, not for its whole past.
        """
        layer.scratch = ()
        if isinstance(layer.bank, BlockBank):
            layer.bank.join(layer)
            return
        if self._dense_layer(ctx):
            return
        blocks = self._cut(ctx.shape, ctx.prompt, past)
        between = self._between(ctx.shape, ctx.prompt, past)
        sink, known = between.start, 0
        if kept:
            known = self._between(ctx.shape, ctx.prompt, kept).stop
            between = slice(max(sink, known), between.stop)
        keys, own = layer.directions("k", between), layer.own["attention"]
        order = order_of(buckets(keys, BUCKET_BITS), 2**BUCKET_BITS)
        layer.permute(between, order)
        own["order"][:, :, between.start - sink : between.stop - sink] = (
            order + between.start - sink
        )
        log_count = own["log_count"][:, :, : blocks.all * blocks.size]
        changed = slice(known, past)
        log_count[:, :, changed] = layer.log_count[:, :, changed]
        held = layer.log_count[:, :, between].expand(-1, log_count.shape[1], -1)
        log_count[:, :, between] = held.gather(2, order)
        log_count[:, :, past:] = -math.inf
        first = changed.start // blocks.size  # the first block that has changed
        encode_blocks(layer.past(past), log_count, blocks.size, _codes(own), first)
        meter.add("macs", keys.numel() * BUCKET_BITS)

    def attend(self, q: Tensor, layer: KVStore, ctx: PassContext, meter: Meter) -> Tensor:
        if layer.bank is not None:
            return self._attend_bank(q, layer, ctx, meter)
        if self._reads_all(ctx):
            return self._attend_all(q, layer, ctx, meter)
        blocks = self._cut(ctx.shape, ctx.prompt, ctx.past)
        if ctx.shape.token_by_token and ctx.tokens > 1:
            parts = [
                self.attend(q[:, :, i : i + 1], layer, ctx.token(i), meter)
                for i in range(ctx.tokens)
            ]
            return torch.cat(parts, 2)
        if ctx.shape.token_by_token or self._chooses(ctx):
            self._choose(q, layer, ctx, blocks, meter)
        most = self._blocks_read(blocks, self._full(blocks, ctx))
        return self._read_blocks(q, layer, ctx, most, meter)

    def _attend_bank(self, q: Tensor, layer: KVStore, ctx: PassContext, meter: Meter) -> Tensor:
        """Attention over chosen blocks of a bank, and all present entries."""
        bank = layer.bank
        assert isinstance(bank, BlockBank)
        layout, full = bank.layout, ctx.past == bank.layout.room
        if ctx.past == 0 or (ctx.given and not full):
            return self._attend_resident(q, layer, ctx, meter)
        sink, held, newest = layout.blocks(ctx.past)
        cut = Blocks(sink + held + newest, sink, newest, layout.block)
        all_resident = Blocks(layout.sink + layout.places + layout.open, sink, newest, layout.block)
        read = self._blocks_read(cut, all_resident)
        # the first pass over a chunk does not wait for all that it wants, unless it is the only one
        early = not ctx.before and ctx.pass_index < ctx.pass_count - 1
        if not ctx.before:
            bank.join(layer)
            layer.scratch = ()
            rows = layout.sink + layout.most + layout.open if full else cut.all
            mass = (mean_mass if full else block_mass)(q, bank.codes, rows, layout.tile)
            meter.add("macs", q.shape[:3].numel() * rows * layout.code)
            chosen = None if self.read == 1 else read
            bank.choose(mass, ctx.past, chosen, early, ctx.pass_count - ctx.pass_index)
            if full:
                bank.fetch(layer)
        if self.read == 1:  # every tile reads all that is resident
            if not early:
                bank.join(layer)
            out = self._attend_resident(q, layer, ctx, meter)
        else:
            table = bank.table(layer, ctx.past, read, early)
            answer = block_sparse_attention(q, *layer.now(ctx), table, layer.scratch)
            layer.scratch = () if early else answer.kept
            meter.add("pairs", answer.pairs)
            meter.add("macs", 2 * answer.pairs * q.shape[3])
            out = answer.out
        if full and early:
            bank.fetch_later(layer)
        return out

    def _attend_resident(self, q: Tensor, layer: KVStore, ctx: PassContext, meter: Meter) -> Tensor:
        """Attention over all of a bank that is resident, and all present entries."""
        assert isinstance(layer.bank, BlockBank)
        weights = None if layer.bank.layout.whole else self.log_weights(layer, ctx)
        count(meter, "pairs", q, ctx.end)
        return read_all(q, layer, ctx, weights)

    def _full(self, blocks: Blocks, ctx: PassContext) -> Blocks:
        """The blocks of a full cache: while it fills, it holds too little to leave much out."""
        return blocks if ctx.room is None else self._cut(ctx.shape, ctx.prompt, ctx.room)

    def _blocks_read(self, blocks: Blocks, full: Blocks) -> int:
        if self.top_p is not None:
            return blocks.all
        if self.k is not None:
            most = -(-self.k // blocks.size)
        else:
            assert self.read is not None
            most = round(self.read * full.all)
        return min(blocks.all, max(blocks.always, most, 1))

    def _choose(
        self, q: Tensor, layer: KVStore, ctx: PassContext, blocks: Blocks, meter: Meter
    ) -> None:
        """Write each tile's blocks to the map: always read, then the likeliest; -1 for none."""
        layer.scratch = ()
        mass = self._mass(q, layer, ctx, blocks.all)  # [B, H, tiles, blocks]
        most, own = self._blocks_read(blocks, self._full(blocks, ctx)), layer.own["attention"]
        meter.add("macs", q.shape[:3].numel() * blocks.all * own["code"].shape[3])
        tiles = mass.shape[2]
        last = blocks.all - blocks.tail
        best = mass[..., blocks.head : last].topk(
            most - blocks.always, -1, sorted=self.top_p is not None
        )
        ids = best.indices + blocks.head
        if self.top_p is not None:
            # a block is read while the mass before it is still short of top_p
            ends = mass[..., : blocks.head].sum(-1) + mass[..., last:].sum(-1)
            # a GPU adds in pieces, and its sums may fall by a rounding
            before = (ends.unsqueeze(-1) + best.values.cumsum(-1) - best.values).cummax(-1).values
            ids = ids.masked_fill(before >= self.top_p * mass.sum(-1, keepdim=True), -1)
        chosen = own["map"][:, :, :tiles, :most]
        chosen[..., : blocks.head] = torch.arange(blocks.head, device=q.device)
        chosen[..., blocks.head : blocks.always] = torch.arange(last, blocks.all, device=q.device)
        chosen[..., blocks.always :] = ids
        own["count"][:, :, :tiles] = most if self.top_p is None else (chosen >= 0).sum(-1)

    def _mass(self, q: Tensor, layer: KVStore, ctx: PassContext, blocks: int) -> Tensor:
        """Each tile's estimated attention mass on each past block, [B, H, tiles, blocks]."""
        if self.hash == "int8" and self._cut(ctx.shape, ctx.prompt, ctx.past).size == 1:
            weight = None if ctx.plain else layer.own["attention"]["weight"][:, :, : ctx.past]
            return entry_mass(
                q, layer.vectors("k", slice(0, ctx.past)), weight, self._tile(ctx.shape)
            )
        return block_mass(q, _codes(layer.own["attention"]), blocks, self._tile(ctx.shape))


def _codes(own: Mapping[str, Tensor]) -> Codes:
    return Codes(own["code"], own["scale"], own["weight"])
