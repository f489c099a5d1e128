"""What block-sparse attention policies share: blocks, tiles, block tables and their log-weights."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from tachyscope.attention import AttentionPolicy, attend_blocks
from tachyscope.attention.dense import read_all
from tachyscope.core.types import PassContext, Shape
from tachyscope.kernels.block_sparse import BlockTable
from tachyscope.kernels.slots import permute
from tachyscope.store import KVStore, LayerPass, Tensors
from tachyscope.store.bank import BlockBank

# a default block is 1/BLOCK_SHARE of a latent frame, and LARGEST entries at most: 128 of Wan's 1560
# at 480p. On Atrium, whose frames have 64 tokens, blocks of 4 lose 1 dB where 16 lose 10
BLOCK_SHARE, LARGEST = 12, 128
# help of the settings with these names
DENSE_PASSES = "Share of a chunk's passes, the first ones, that read everything, from 0 to 1."
DENSE_LAYERS = "Share of the layers, the first ones, that read everything, from 0 to 1."


class BlockAttention(AttentionPolicy):
    """Each tile of queries reads the blocks that a table lists, and the whole present chunk.

    A block is a number of consecutive slots; the last one may be partial. The table is two tensors
    of the layer, "map" and "count". dense_passes, dense_layers: that share of the first passes and
    layers reads everything. So do given frames of a chunk model.
    """

    indexes: ClassVar[bool] = True
    dense_passes: float
    dense_layers: float

    @abc.abstractmethod
    def _block(self, shape: Shape) -> int:
        """Slots of a block."""

    def _tile(self, shape: Shape) -> int:
        """Queries that read the same blocks."""
        return self._block(shape)

    def _between(self, shape: Shape, prompt: int, past: int) -> slice:
        """The slots whose keys and values are permuted between commits."""
        return slice(0, 0)

    def tensors(self, shape: Shape, slots: int, device: torch.device) -> Tensors:
        block = self._block(shape)
        most = -(-slots // block)
        kv = (shape.batch, shape.kv_heads)
        tile = (shape.batch, shape.heads, -(-shape.max_pass_tokens // self._tile(shape)))
        int32: dict[str, Any] = {"dtype": torch.int32, "device": device}
        return {
            # log-weights of the slots; a partial block ends in empty ones
            "log_count": torch.zeros(
                *kv, -(-most * block // 4) * 4, dtype=torch.float32, device=device
            ),
            # the blocks that each tile reads, and their number
            "map": torch.zeros(*tile, most, **int32),
            "count": torch.zeros(tile, **int32),
        }

    def build_index(self, p: LayerPass, past: int, kept: int = 0) -> None:
        p.layer.scratch = ()
        if not self._dense_layer(p.ctx):
            self._weigh(p.layer, p.ctx.shape, past)

    def _weigh(self, layer: KVStore, shape: Shape, past: int, order: Tensor | None = None) -> None:
        """Set the log-weights of the past's slots, which hold the entries `order` [B, Hkv, n]."""
        log_count = layer.own["attention"]["log_count"]
        held = layer.log_count[:, :, :past].expand(-1, log_count.shape[1], -1)
        log_count[:, :, :past] = held if order is None else held.gather(2, order)
        block = self._block(shape)
        log_count[:, :, past : -(-past // block) * block] = -math.inf

    def restore_order(self, p: LayerPass, past: int) -> None:
        layer, ctx = p.layer, p.ctx
        between = self._between(ctx.shape, ctx.prompt, past)
        if between.stop > between.start and not self._dense_layer(ctx) and layer.bank is None:
            order = layer.own["attention"]["order"][:, :, : between.stop - between.start]
            layer.permute(between, order, back=True)

    def grow(self, own: dict[str, Tensor], larger: Mapping[str, Tensor], kept: int) -> None:
        if kept:
            for name in own.keys() - {"map", "count"}:
                larger[name][:, :, : own[name].shape[2]] = own[name]
        own.update(larger)

    def to_index_order(self, p: LayerPass, x: Tensor) -> Tensor:
        ctx = p.ctx
        between = self._between(ctx.shape, ctx.prompt, ctx.past)
        if between.stop > between.start and not self._dense_layer(ctx):
            x = x.clone()
            order = p.layer.own["attention"]["order"][:, :, : between.stop - between.start]
            permute(x[:, :, between], order)
        return x

    def log_weights(self, p: LayerPass) -> Tensor:
        layer, ctx = p.layer, p.ctx
        if self._dense_layer(ctx):
            return super().log_weights(p)
        own = layer.own["attention"] if layer.bank is None else layer.bank.tensors
        past = own["log_count"][:, :, : ctx.past]
        if self.log_weight and not self.weighs(ctx):  # the index includes past_weight
            slots = self.weighed(ctx)
            if layer.bank is not None:
                slots = cast(BlockBank, layer.bank).layout.sealed(ctx.past)
            past = past.clone()
            past[:, :, slots] -= self.log_weight
        now = layer.log_count[:, :, ctx.past : ctx.end].expand(-1, past.shape[1], -1)
        return torch.cat([past, now], 2)

    def _dense_layer(self, ctx: PassContext) -> bool:
        return ctx.layer < math.ceil(self.dense_layers * ctx.shape.layers)

    def first_sparse_pass(self, ctx: PassContext) -> int:
        return math.ceil(self.dense_passes * ctx.pass_count) if ctx.pass_count > 1 else 0

    def _chooses(self, ctx: PassContext) -> bool:
        """Whether this is the chunk's first pass that may leave blocks out."""
        return all(step < self.first_sparse_pass(ctx) for step in ctx.before)

    def _reads_all(self, ctx: PassContext) -> bool:
        # given frames read everything: the rest of the video depends on their keys and values
        given = ctx.given and not ctx.shape.token_by_token
        early = ctx.pass_index < self.first_sparse_pass(ctx)
        return ctx.past == 0 or self._dense_layer(ctx) or early or given

    def _attend_all(self, p: LayerPass, q: Tensor) -> Tensor:
        p.work.add_reads(q, p.ctx.end)
        return read_all(p, q, self._weights(p, p.ctx.plain))

    def _weights(self, p: LayerPass, plain: bool) -> Tensor | None:
        """Log-weights of the past and the present chunk, None if all are 0."""
        return None if plain and not self.weighs(p.ctx) else self.log_weights(p)

    def _read_blocks(self, p: LayerPass, q: Tensor, most: int) -> Tensor:
        """Attention over the blocks of each tile, at most `most`, and the present chunk."""
        layer, ctx = p.layer, p.ctx
        own, block = layer.own["attention"], self._block(ctx.shape)
        past = layer.past(ctx.past)
        table = BlockTable(
            past.k, past.v, own["log_count"], own["map"][..., :most], own["count"],
            self._tile(ctx.shape), block,
            plain=ctx.plain and not (ctx.past % block or self.log_weight),
            k_scale=past.k_scale, v_scale=past.v_scale,
        )  # fmt: skip
        return self._read_table(p, q, table)

    def _read_table(self, p: LayerPass, q: Tensor, table: BlockTable) -> Tensor:
        layer, ctx = p.layer, p.ctx
        # entries of the present chunk have no log-weights
        read = attend_blocks(ctx.shape, q, *layer.now(ctx), table, layer.scratch)
        layer.scratch = () if ctx.shape.token_by_token else read.kept
        p.work.add_pairs(read.pairs, q.shape[3])
        return read.out


def default_block(shape: Shape, block: int | None) -> int:
    """Slots of a block: as set, or a part of a latent frame."""
    return block or power_of_two(shape.tokens_per_frame // BLOCK_SHARE)


def whole_block(shape: Shape) -> int | None:
    """The largest divisor of a latent frame's tokens that is more than half of a default block and
    at most LARGEST and 1/BLOCK_SHARE of a frame; None if there is none."""
    tokens, least = shape.tokens_per_frame, default_block(shape, None) // 2
    most = min(max(tokens // BLOCK_SHARE, 1), LARGEST)
    return next((n for n in range(most, least, -1) if tokens % n == 0), None)


def power_of_two(most: int) -> int:
    """The largest power of two that is `most` or less, from 1 to LARGEST."""
    return 1 << min(max(most, 1), LARGEST).bit_length() - 1
