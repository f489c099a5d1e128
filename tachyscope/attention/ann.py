"""Read only the nearest entries (AnnSA)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, final

import torch
from torch import Tensor

from tachyscope.attention import AttentionPolicy, count
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
from tachyscope.kernels.block_sparse import BlockTable, block_sparse_attention
from tachyscope.kernels.hashing import order_of, planes
from tachyscope.kernels.slots import permute
from tachyscope.meter import Meter
from tachyscope.settings import check_settings, setting
from tachyscope.store import KVStore, Tensors
from tachyscope.store.bank_layout import BankLayout
from tachyscope.types import PassContext, Shape

# sign bits that order the past, so that a block's entries are alike
BUCKET_BITS = 8


# What a block and a tile are of a latent frame unless asked for: on Atrium, whose frames have 64
# places, blocks of 4 and tiles of 8 lose 1 dB where 16 and 64 lose 10
BLOCK_SHARE, TILE_SHARE, LARGEST = 12, 8, 128


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
class Ann(AttentionPolicy):
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

    dense_passes, dense_layers: that share of the first passes and layers reads everything. So do
    given frames of a chunk model.
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
        "within a twelfth of a latent frame, at most 128.",
    )
    tile: int | None = setting(
        None,
        "Queries that read the same blocks; unless given the largest power of two within an eighth "
        "of a latent frame, at most 128; always 1 in token models.",
    )
    sink: int = setting(1, "First latent frames that every tile reads.")
    newest: int = setting(1, "Latest latent frames that every tile reads.")
    dense_passes: float = setting(
        0.0, "Share of a chunk's passes, the first ones, that read everything, from 0 to 1."
    )
    dense_layers: float = setting(
        0.0, "Share of the layers, the first ones, that read everything, from 0 to 1."
    )

    paper: ClassVar[str] = "FAST-AR's AnnSA, arXiv 2602.01801"
    indexes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if sum(dial is not None for dial in (self.read, self.k, self.top_p)) != 1:
            raise TachyscopeError(
                "attention policy 'ann' takes one of read, k, top_p: try ann:read=0.2"
            )
        check_settings(self, "attention", "ann")

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
        tokens, size = shape.tokens_per_frame, self._block(shape)
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
        return self.block or _power(shape.tokens_per_frame // BLOCK_SHARE)

    def _cut(self, shape: Shape, prompt: int, past: int) -> Blocks:
        between = self._between(shape, prompt, past)
        size = self._block(shape)
        count, head = -(-past // size), -(-between.start // size)
        tail = count - max(head, between.stop // size) if between.stop < past else 0
        return Blocks(count, head, tail, size)

    def _between(self, shape: Shape, prompt: int, past: int) -> slice:
        """The slots that are ordered, between the sink and the newest."""
        sink = min(past, prompt + self.sink * shape.tokens_per_frame)
        return slice(sink, past - min(past - sink, self.newest * shape.tokens_per_frame))

    def tensors(self, shape: Shape, slots: int, device: torch.device) -> Tensors:
        size = self._cut(shape, 0, 0).size
        most = -(-slots // size)
        tiles = -(-shape.max_pass_tokens // self._tile(shape))
        block, code = (shape.batch, shape.kv_heads, most), torch.int8
        width = shape.head_dim if self.hash == "int8" else self.bits
        if self.hash == "lsh":
            code = torch.float32
            planes(self.bits, shape.head_dim, device)  # made now, not in the first chunk
        planes(BUCKET_BITS, shape.head_dim, device)
        whole: dict[str, Any] = {"dtype": torch.int32, "device": device}
        fine: dict[str, Any] = {"dtype": torch.float32, "device": device}
        tile = (shape.batch, shape.heads, tiles)
        return {
            # whose key and value each slot between sink and newest holds, counted from the sink
            "order": torch.zeros(*block[:2], slots, **whole),
            # the weights of what the slots hold; a part block ends in empty ones
            "log_count": torch.zeros(*block[:2], -(-most * size // 4) * 4, **fine),
            "code": torch.zeros(*block, width, dtype=code, device=device),
            "scale": torch.zeros(*block, 1, **fine),
            "weight": torch.zeros(block, **fine),
            # the blocks that each tile reads, -1 behind them, and how many
            "map": torch.zeros(*tile, most, **whole),
            "count": torch.zeros(tile, **whole),
        }

    def _tile(self, shape: Shape) -> int:
        return (
            1 if shape.token_by_token else self.tile or _power(shape.tokens_per_frame // TILE_SHARE)
        )

    def build_index(
        self, layer: KVStore, ctx: PassContext, past: int, meter: Meter, kept: int = 0
    ) -> None:
        """Order what lies between sink and newest by bucket; note each block's code and weight.

        Behind entries that stay as they were indexed, only what is new there is ordered: a cache
        that appends pays for a chunk, not for its whole past.
        """
        layer.scratch = ()
        if layer.bank is not None:
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

    def restore_order(self, layer: KVStore, ctx: PassContext, past: int) -> None:
        if not self._dense_layer(ctx) and layer.bank is None:
            between = self._between(ctx.shape, ctx.prompt, past)
            order = layer.own["attention"]["order"][:, :, : between.stop - between.start]
            layer.permute(between, order, back=True)

    def grow(self, own: dict[str, Tensor], larger: Mapping[str, Tensor], kept: int) -> None:
        if kept:
            for name in ("order", "log_count", "code", "scale", "weight"):
                larger[name][:, :, : own[name].shape[2]] = own[name]
        own.update(larger)

    def to_index_order(self, x: Tensor, layer: KVStore, ctx: PassContext) -> Tensor:
        if not self._dense_layer(ctx):
            x, between = x.clone(), self._between(ctx.shape, ctx.prompt, ctx.past)
            order = layer.own["attention"]["order"][:, :, : between.stop - between.start]
            permute(x[:, :, between], order)
        return x

    def _dense_layer(self, ctx: PassContext) -> bool:
        return ctx.layer < math.ceil(self.dense_layers * ctx.shape.layers)

    def attend(self, q: Tensor, layer: KVStore, ctx: PassContext, meter: Meter) -> Tensor:
        if layer.bank is not None:
            return self._attend_bank(q, layer, ctx, meter)
        first = math.ceil(self.dense_passes * ctx.pass_count) if ctx.pass_count > 1 else 0
        # given frames read everything: what they leave in the cache is what the video rests on
        given = ctx.given and not ctx.shape.token_by_token
        if ctx.past == 0 or self._dense_layer(ctx) or ctx.pass_index < first or given:
            count(meter, "pairs", q, ctx.end)
            return read_all(q, layer, ctx, None if ctx.plain else self.log_weights(layer, ctx))
        blocks = self._cut(ctx.shape, ctx.prompt, ctx.past)
        if ctx.shape.token_by_token and ctx.tokens > 1:
            parts = [
                self.attend(q[:, :, i : i + 1], layer, ctx.token(i), meter)
                for i in range(ctx.tokens)
            ]
            return torch.cat(parts, 2)
        if ctx.shape.token_by_token or all(step < first for step in ctx.before):
            self._choose(q, layer, ctx, blocks, meter)
        return self._read_blocks(q, layer, ctx, blocks, meter)

    def log_weights(self, layer: KVStore, ctx: PassContext) -> Tensor:
        if self._dense_layer(ctx):
            return super().log_weights(layer, ctx)
        own = layer.own["attention"] if layer.bank is None else layer.bank.tensors
        past = own["log_count"][:, :, : ctx.past]
        now = layer.log_count[:, :, ctx.past : ctx.end].expand(-1, past.shape[1], -1)
        return torch.cat([past, now], 2)

    def _attend_bank(self, q: Tensor, layer: KVStore, ctx: PassContext, meter: Meter) -> Tensor:
        """Attention over chosen blocks of a bank, and all present entries."""
        bank = layer.bank
        assert bank is not None
        layout, full = bank.layout, ctx.past == bank.layout.room
        if ctx.past == 0 or (ctx.given and not full):
            weights = None if layout.whole else self.log_weights(layer, ctx)
            count(meter, "pairs", q, ctx.end)
            return read_all(q, layer, ctx, weights)
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
            bank.choose(mass, ctx.past, read, early, ctx.pass_count - ctx.pass_index)
            if full:
                bank.fetch(layer)
        table = bank.table(layer, ctx.past, read, early)
        found = block_sparse_attention(q, *layer.now(ctx), table, layer.scratch)
        layer.scratch = () if early else found.kept
        if full and early:
            bank.fetch_later(layer)
        meter.add("pairs", found.pairs)
        meter.add("macs", 2 * found.pairs * q.shape[3])
        return found.out

    def _read_blocks(
        self, q: Tensor, layer: KVStore, ctx: PassContext, blocks: Blocks, meter: Meter
    ) -> Tensor:
        """Attention over the blocks that each tile has chosen, and all present entries."""
        most, own = self._blocks_read(blocks, self._full(blocks, ctx)), layer.own["attention"]
        past = layer.past(ctx.past)
        table = BlockTable(
            past.k, past.v, own["log_count"], own["map"][..., :most], own["count"],
            self._tile(ctx.shape), blocks.size, ragged=self.top_p is not None,
            plain=ctx.plain and not ctx.past % blocks.size and self.top_p is None,
            k_scale=past.k_scale, v_scale=past.v_scale,
        )  # fmt: skip
        # present entries stand for themselves alone
        read = block_sparse_attention(q, *layer.now(ctx), table, layer.scratch)
        layer.scratch = () if ctx.shape.token_by_token else read.kept
        meter.add("pairs", read.pairs)
        meter.add("macs", 2 * read.pairs * q.shape[3])
        if read.masked is not None:
            meter.add("simulated_pairs_skipped", read.masked)
        return read.out

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


def _power(most: int) -> int:
    """The largest power of two that is `most` or less, from 1 to LARGEST."""
    return 1 << min(max(most, 1), LARGEST).bit_length() - 1


def _codes(own: Mapping[str, Tensor]) -> Codes:
    return Codes(own["code"], own["scale"], own["weight"])
