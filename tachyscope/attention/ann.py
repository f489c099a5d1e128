"""Read only the nearest entries (AnnSA)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, cast, final

import torch
from torch import Tensor

from tachyscope.attention import PAST_WEIGHT, WEIGHTS, attend_blocks, between
from tachyscope.attention.blocks import (
    DENSE_LAYERS,
    DENSE_PASSES,
    BlockAttention,
    default_block,
    power_of_two,
    whole_block,
)
from tachyscope.attention.dense import read_all
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.limits import LATENTS, PART, SHARE, Bound
from tachyscope.core.policy import setting
from tachyscope.core.types import PassContext, Shape
from tachyscope.kernels.attention_fp8 import listed_attention_fp8
from tachyscope.kernels.block_index import (
    Codes,
    block_mass,
    buckets,
    encode_blocks,
    entry_mass,
    mean_mass,
)
from tachyscope.kernels.hashing import order_of, planes
from tachyscope.store import LayerPass, Tensors
from tachyscope.store.bank import BlockBank
from tachyscope.store.bank_layout import BankLayout
from tachyscope.store.coded_bank import CodedBank

# hash bits that order the past, so that the keys of a block are similar
BUCKET_BITS = 8
# a default tile is 1/TILE_SHARE of a latent frame: on Atrium tiles of 8 lose 1 dB where 64 lose 10
TILE_SHARE = 8


class Blocks(NamedTuple):
    """The blocks of consecutive slots that a past is divided into; the last may be partial."""

    all: int
    head: int  # the first ones, of the prompt and the sink
    tail: int  # the last ones, of the newest entries
    size: int  # slots of a block

    @property
    def always(self) -> int:
        return self.head + self.tail


@final
@dataclass(frozen=True)
class Ann(BlockAttention, name="ann"):
    """Each tile of queries reads the blocks of past entries that it is likely to attend to.

    After each commit the past is sorted by hash bucket and divided into blocks. A block's code (its
    mean signs, or mean key in int8) estimates the attention mass of each query on it, and a tile
    reads the blocks of largest mass: a share `read` of all past blocks (of a full cache, if it is
    bounded), or `k` entries. The present chunk is always read; so are `sink` and `newest` latent
    frames and a prompt in the cache, which are not sorted and count in `read` and `k`. block=1,
    tile=1 is the paper's per-query form; by default both are parts of a latent frame. The choice is
    made in a chunk's first sparse pass and kept for its others; a token model chooses for every
    token.
    """

    read: float | None = setting(
        None,
        "Share of the past's blocks that a tile of queries reads, over 0 and at most 1.",
        bound=PART,
        instead_of=("k",),
    )
    k: int | None = setting(
        None,
        "Past entries that a tile of queries reads.",
        bound=Bound(1, 100_000_000),
        instead_of=("read",),
    )
    hash: Literal["int8", "lsh"] = setting(
        "int8",
        "Code of a block that queries are scored against: its mean key in 8 bits (int8; in "
        "blocks of one entry the key itself, unrounded), or the signs of random projections of its "
        "keys (lsh).",
    )
    bits: int = setting(
        32, "Random projections of hash=lsh; int8 does not use it.", bound=Bound(1, 256)
    )
    block: int | None = setting(
        None,
        "Past entries that are read or left out together; by default the largest power of two "
        "within a twelfth of a latent frame, at most 128; in a bank read whole the largest divisor "
        "of a latent frame.",
        bound=Bound(1, 4_096),
    )
    tile: int | None = setting(
        None,
        "Queries that read the same blocks; by default the largest power of two within an eighth "
        "of a latent frame, at most 128; always 1 in token models.",
        bound=Bound(1, 4_096),
    )
    sink: int = setting(1, "First latent frames that every tile reads.", bound=LATENTS)
    newest: int = setting(1, "Latest latent frames that every tile reads.", bound=LATENTS)
    past_weight: float | None = setting(None, PAST_WEIGHT, bound=WEIGHTS)
    order: Literal["time"] | None = setting(
        None,
        "Blocks of entries in the order in which they were made, row by row (time); by default in "
        "the order of a hash of their keys, the signs of random projections.",
    )
    dense_passes: float = setting(0.0, DENSE_PASSES, bound=SHARE)
    dense_layers: float = setting(0.0, DENSE_LAYERS, bound=SHARE)

    paper: ClassVar[str] = "FAST-AR's AnnSA, arXiv 2602.01801"
    splits_heads: ClassVar[bool] = True

    @property
    def reorders(self) -> bool:
        return self.order is None

    def check_settings(self) -> None:
        if (self.read is None) == (self.k is None):
            raise TachyscopeError("attention policy 'ann' takes read or k: try ann:read=0.2")

    @property
    def bank_fault(self) -> str | None:
        if self.dense_passes or self.dense_layers:
            return "dense_passes or dense_layers: leave them out"
        return None

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
            least = math.ceil(1000 * blocks.always / blocks.all) / 1000
            raise TachyscopeError(
                f"attention policy 'ann': read={self.read:g} of {blocks.all} past blocks is less "
                f"than the {blocks.always} of prompt, sink={self.sink}f and newest={self.newest}f: "
                f"raise read to {least:g}, or lower sink or newest"
            )

    def bank_layout(self, shape: Shape, slots: int, budget: int, coded: bool = False) -> BankLayout:
        """How a bank divides a layer of `slots` cache slots; raises where they are too few.

        coded: resident blocks are float8 codes.
        """
        tokens = shape.tokens_per_frame
        size = self._block(shape) if coded else self._bank_block(shape)
        sink, newest = -(-self.sink * tokens // size), self.newest * tokens
        room = slots - shape.max_pass_tokens
        resident, chunk = (room - newest) // size - sink, shape.chunk * tokens
        sealed = -(-chunk // size)  # blocks of a chunk
        if resident < sealed:
            least = -(-((sink + sealed) * size + newest + shape.max_pass_tokens) // tokens)
            raise TachyscopeError(
                f"cache policy 'bank': {slots} resident entries have no room for a chunk of "
                f"{shape.chunk}f beside sink={self.sink}f, newest={self.newest}f and the present "
                f"{shape.chunk + shape.rolling_frames}f: raise resident to {least}f or more"
            )
        return BankLayout(
            block=size,
            sink=sink,
            resident_slots=resident,
            newest=room - (sink + resident) * size,
            capacity=max(-(-budget // chunk) * sealed, resident),
            tile=self._tile(shape),
            order_bits=0 if self.order else BUCKET_BITS,
            code_width=shape.head_dim if self.hash == "int8" else self.bits,
            code_dtype=torch.int8 if self.hash == "int8" else torch.float32,
            blocks_full=not (tokens % size or room % size),
            bank=CodedBank if coded else BlockBank,
            log_weight=self.log_weight,
            coded=coded,
        )

    def _block(self, shape: Shape) -> int:
        return default_block(shape, self.block)

    def _bank_block(self, shape: Shape) -> int:
        """Entries of a bank's block. Where all that is resident is read, no kernel needs a power of
        two, and a divisor of a latent frame fills every block: no log-weights are read."""
        if self.read == 1 and self.block is None:
            return whole_block(shape) or self._block(shape)
        return self._block(shape)

    def _cut(self, shape: Shape, prompt: int, past: int) -> Blocks:
        middle = self._middle(shape, prompt, past)
        size = self._block(shape)
        count, head = -(-past // size), -(-middle.start // size)
        tail = count - max(head, middle.stop // size) if middle.stop < past else 0
        return Blocks(count, head, tail, size)

    def _between(self, shape: Shape, prompt: int, past: int) -> slice:
        return slice(0, 0) if self.order else self._middle(shape, prompt, past)

    def _middle(self, shape: Shape, prompt: int, past: int) -> slice:
        return between(shape, prompt, past, self.sink, self.newest)

    def weighed(self, ctx: PassContext) -> slice:
        return self._middle(ctx.shape, ctx.prompt, ctx.past)

    def tensors(self, shape: Shape, slots: int, device: torch.device) -> Tensors:
        block = (shape.batch, shape.kv_heads, -(-slots // self._block(shape)))
        width, code = shape.head_dim if self.hash == "int8" else self.bits, torch.int8
        if self.hash == "lsh":
            code = torch.float32
            planes(self.bits, shape.head_dim, device)  # cached before the first chunk
        planes(BUCKET_BITS, shape.head_dim, device)
        float32: dict[str, Any] = {"dtype": torch.float32, "device": device}
        return {
            **super().tensors(shape, slots, device),
            # the cache's slot of the entry in each slot, both counted from the sink's end
            "order": torch.zeros(*block[:2], slots, dtype=torch.int32, device=device),
            "code": torch.zeros(*block, width, dtype=code, device=device),
            "scale": torch.zeros(*block, 1, **float32),
            "weight": torch.zeros(block, **float32),
        }

    def _tile(self, shape: Shape) -> int:
        if shape.token_by_token:
            return 1
        return self.tile or power_of_two(shape.tokens_per_frame // TILE_SHARE)

    def build_index(self, p: LayerPass, past: int, kept: int = 0) -> None:
        """Sort the entries between sink and newest by hash bucket, and encode each block.

        With `kept` entries of the last index only those behind them are sorted: a cache that
        appends pays for a chunk, not for its whole past.
        """
        layer, ctx = p.layer, p.ctx
        layer.scratch = ()
        if layer.bank is not None:
            layer.bank.wait_for_copies()
            return
        if self._dense_layer(ctx):
            return
        blocks = self._cut(ctx.shape, ctx.prompt, past)
        middle = self._middle(ctx.shape, ctx.prompt, past)
        sink, known = middle.start, 0
        if kept:
            known = self._middle(ctx.shape, ctx.prompt, kept).stop
            middle = slice(max(sink, known), middle.stop)
        own = layer.own["attention"]
        log_count = own["log_count"][:, :, : blocks.all * blocks.size]
        changed = slice(known, past)
        log_count[:, :, changed] = layer.log_count[:, :, changed]
        held = layer.log_count[:, :, middle].expand(-1, log_count.shape[1], -1)
        if self.order is None:
            keys = layer.directions("k", middle)
            order = order_of(buckets(keys, BUCKET_BITS), 2**BUCKET_BITS)
            layer.permute(middle, order)
            slots = slice(middle.start - sink, middle.stop - sink)
            own["order"][:, :, slots] = order + middle.start - sink
            held = held.gather(2, order)
            p.work.macs += keys.numel() * BUCKET_BITS
        log_count[:, :, middle] = held + self.log_weight
        log_count[:, :, past:] = -math.inf
        first = changed.start // blocks.size  # the first block that has changed
        encode_blocks(layer.past(past), log_count, blocks.size, _codes(own), first)

    def attend(self, p: LayerPass, q: Tensor) -> Tensor:
        ctx = p.ctx
        if p.layer.bank is not None:
            return self._attend_bank(p, q)
        if self._reads_all(ctx):
            return self._attend_all(p, q)
        blocks = self._cut(ctx.shape, ctx.prompt, ctx.past)
        if ctx.shape.token_by_token and ctx.tokens > 1:
            parts = [self.attend(p.token(i), q[:, :, i : i + 1]) for i in range(ctx.tokens)]
            return torch.cat(parts, 2)
        if ctx.shape.token_by_token or self._chooses(ctx):
            self._choose(p, q, blocks)
        return self._read_blocks(p, q, self._blocks_read(blocks, self._full(blocks, ctx)))

    def _attend_bank(self, p: LayerPass, q: Tensor) -> Tensor:
        """Attention over the chosen blocks of a bank and the present chunk."""
        layer, ctx, work = p.layer, p.ctx, p.work
        bank = cast(BlockBank, layer.bank)
        layout, full = bank.layout, ctx.past == bank.layout.room
        # float8 blocks alone are listed in a table, other entries are read whole
        nothing_listed = layout.coded and not bank.coded_entries(ctx.past)
        if ctx.past == 0 or (ctx.given and not full) or nothing_listed:
            return self._attend_resident(p, q)
        sink, held, newest = layout.blocks(ctx.past)
        cut = Blocks(sink + held + newest, sink, newest, layout.block)
        all_resident = Blocks(layout.table_blocks, sink, newest, layout.block)
        read = self._blocks_read(cut, all_resident)
        # a chunk's first pass does not wait for all of its blocks, unless it is the only pass
        early = not ctx.before and ctx.pass_index < ctx.pass_count - 1
        if not ctx.before:
            bank.wait_for_copies()
            layer.scratch = ()
            rows = layout.index_rows if full else cut.all
            mass = (mean_mass if full else block_mass)(q, bank.codes, rows, layout.tile)
            work.macs += q.shape[:3].numel() * rows * layout.code_width
            chosen = None if self.read == 1 else read
            bank.choose(mass, ctx.past, chosen, early, ctx.pass_count - ctx.pass_index)
            if full:
                bank.fetch(layer)
        if layout.coded:
            out = self._attend_codes(p, q, 0 if self.read == 1 else read, early)
        elif self.read == 1:  # every tile reads all that is resident
            if not early:
                bank.wait_for_copies()
            out = self._attend_resident(p, q)
        else:
            table = bank.table(layer, ctx.past, read, early, self.weighs(ctx))
            answer = attend_blocks(ctx.shape, q, *layer.now(ctx), table, layer.scratch)
            layer.scratch = () if early else answer.kept
            work.add_pairs(answer.pairs, q.shape[3])
            out = answer.out
        if full and early:
            bank.prefetch(layer)
        return out

    def _attend_codes(self, p: LayerPass, q: Tensor, read: int, early: bool) -> Tensor:
        """Attention over `read` blocks of float8 codes (0: all), and all that is not coded."""
        layer, ctx = p.layer, p.ctx
        bank = cast(CodedBank, layer.bank)
        listed = bank.listed(ctx.past, read, early, self.weighs(ctx))
        answer = listed_attention_fp8(
            q, *bank.uncoded_kv(layer, ctx), listed, bank.tensors["centre"], layer.scratch
        )
        layer.scratch = () if early else answer.kept
        p.work.add_pairs(answer.pairs, q.shape[3])
        return answer.out

    def _attend_resident(self, p: LayerPass, q: Tensor) -> Tensor:
        """Attention over all that is resident of a bank, and the present chunk."""
        bank = cast(BlockBank, p.layer.bank)
        if bank.coded_entries(p.ctx.past):
            return self._attend_codes(p, q, 0, False)
        p.work.add_reads(q, p.ctx.end)
        return read_all(p, q, self._weights(p, bank.layout.blocks_full))

    def _full(self, blocks: Blocks, ctx: PassContext) -> Blocks:
        """The blocks of a full cache, of which `read` is a share: a short past is read whole."""
        return blocks if ctx.room is None else self._cut(ctx.shape, ctx.prompt, ctx.room)

    def _blocks_read(self, blocks: Blocks, full: Blocks) -> int:
        if self.k is not None:
            most = -(-self.k // blocks.size)
        else:
            assert self.read is not None
            most = round(self.read * full.all)
        return min(blocks.all, max(blocks.always, most, 1))

    def _choose(self, p: LayerPass, q: Tensor, blocks: Blocks) -> None:
        """Write each tile's block table: those always read, then those of largest mass."""
        layer, ctx = p.layer, p.ctx
        layer.scratch = ()
        mass = self._mass(p, q, blocks.all)  # [B, H, tiles, blocks]
        most, own = self._blocks_read(blocks, self._full(blocks, ctx)), layer.own["attention"]
        p.work.macs += q.shape[:3].numel() * blocks.all * own["code"].shape[3]
        tiles = mass.shape[2]
        last = blocks.all - blocks.tail
        best = mass[..., blocks.head : last].topk(most - blocks.always, -1, sorted=False)
        chosen = own["map"][:, :, :tiles, :most]
        chosen[..., : blocks.head] = torch.arange(blocks.head, device=q.device)
        chosen[..., blocks.head : blocks.always] = torch.arange(last, blocks.all, device=q.device)
        chosen[..., blocks.always :] = best.indices + blocks.head
        own["count"][:, :, :tiles] = most

    def _mass(self, p: LayerPass, q: Tensor, blocks: int) -> Tensor:
        """Each tile's estimated attention mass on each past block, [B, H, tiles, blocks]."""
        layer, ctx = p.layer, p.ctx
        if self.hash == "int8" and self._cut(ctx.shape, ctx.prompt, ctx.past).size == 1:
            plain = ctx.plain and not self.log_weight
            weight = None if plain else layer.own["attention"]["weight"][:, :, : ctx.past]
            return entry_mass(
                q, layer.vectors("k", slice(0, ctx.past)), weight, self._tile(ctx.shape)
            )
        return block_mass(q, _codes(layer.own["attention"]), blocks, self._tile(ctx.shape))


def _codes(own: Mapping[str, Tensor]) -> Codes:
    return Codes(own["code"], own["scale"], own["weight"])
