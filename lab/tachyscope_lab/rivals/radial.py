"""Read less the older it is (Radial Attention)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from tachyscope.attention.blocks import DENSE_LAYERS, DENSE_PASSES, default_block
from tachyscope.core.limits import SHARE, TINY, Bound
from tachyscope.core.policy import setting
from tachyscope.core.types import PassContext, Shape
from tachyscope.store import KVStore, LayerPass
from tachyscope_lab.rivals.block_lists import RaggedAttention, check_frames, list_blocks, tile_runs

# a block is read where over so many of the columns it has in the mask have so many rows in it
COLUMNS, ROWS = 0.6, 1 / 3


@final
@dataclass(frozen=True)
class Radial(RaggedAttention, name="radial"):
    """A query reads places near its own, the fewer the further back their latent frame lies.

    How near halves with every doubling of the distance in time; where that is less than a block,
    the block stays and frames are left out instead, every second, every fourth. The frame before
    and the first one are read whole. The mask depends on positions alone: one for all heads.
    """

    decay: float = setting(
        0.2,
        "What the width of the diagonal is multiplied by, over 0; never less than a block.",
        bound=Bound(TINY, 1e6),
    )
    block: int | None = setting(
        None,
        "Entries, and queries, of a block of the mask; unless given the largest power of two "
        "within a twelfth of a latent frame, at most 128.",
        bound=Bound(1, 4_096),
    )
    dense_passes: float = setting(0.2, DENSE_PASSES, bound=SHARE)
    dense_layers: float = setting(0.025, DENSE_LAYERS, bound=SHARE)

    paper: ClassVar[str] = "Radial Attention, arXiv 2506.19852"

    def check(self, shape: Shape, prompt: int, slots: int | None) -> None:
        check_frames("radial", shape, self._block(shape))

    def _block(self, shape: Shape) -> int:
        return default_block(shape, self.block)

    def attend(self, p: LayerPass, q: Tensor) -> Tensor:
        layer, ctx = p.layer, p.ctx
        if self._reads_all(ctx):
            return self._attend_all(p, q)
        if self._chooses(ctx):
            layer.scratch = ()
            list_blocks(self._mask(layer, ctx), layer.own["attention"])
        blocks = -(-ctx.past // self._block(ctx.shape))
        return self._read_blocks(p, q, blocks)

    def _mask(self, layer: KVStore, ctx: PassContext) -> Tensor:
        """Which blocks each tile reads, [B, Hkv or 1, tiles, blocks]."""
        frame, block = ctx.shape.tokens_per_frame, self._block(ctx.shape)
        device = layer.pos.device
        start, rows = tile_runs(ctx.tokens, block, frame, device)
        now = layer.pos[:, :, ctx.past : ctx.end, 0][:, :, start].unsqueeze(-1)
        pos = layer.pos[:, :, None, None, : ctx.past]
        place = pos[..., 1] * ctx.shape.grid[1] + pos[..., 2]
        width = self._width((now - pos[..., 0]).abs(), frame, block)
        # the first latent frame is a sink
        sink = torch.arange(ctx.past, device=device) < frame
        width = width.masked_fill(sink, frame)
        # rows of a run from which a column is no further than its width
        low = (start % frame).unsqueeze(-1)
        high = low + rows.unsqueeze(-1) - 1
        seen = torch.minimum(high, place + width) - torch.maximum(low, place - width) + 1
        seen = seen.clamp(min=0).masked_fill(width < 0, 0)
        dense = seen > ROWS * rows.sum(0).unsqueeze(-1)
        return _shrink(seen > 0, dense, frame, block).any(2)

    def _width(self, distance: Tensor, frame: int, block: int) -> Tensor:
        """How far from its own place a query reads at a distance in time; -1: not at all."""
        doublings = torch.frexp(distance.round()).exponent  # as many as the number has bits
        base = torch.ldexp(torch.full_like(distance, 2.0 ** frame.bit_length()), -doublings)
        width = (base * self.decay).clamp(min=block).floor().clamp(max=frame)
        every = (block / base).floor().clamp(min=1)
        width = width.masked_fill(distance.round() % every != 0, -1)
        return width.masked_fill(distance.round() <= 1, frame)


def _shrink(any_row: Tensor, dense: Tensor, frame: int, block: int) -> Tensor:
    """Blocks [..., blocks] that are read, of columns [..., past] in the mask, and densely so.

    Columns of one latent frame decide together, as do the rows: a block may hold two frames' parts.
    """
    past = any_row.shape[-1]
    first = torch.arange(0, past, block, device=any_row.device)
    stop = (first + block).clamp(max=past)
    cut = torch.minimum((first // frame + 1) * frame, stop)
    read = torch.zeros((), dtype=torch.bool, device=any_row.device)
    sums = [torch.nn.functional.pad(x.cumsum(-1), (1, 0)) for x in (any_row, dense)]
    for lo, hi in ((first, cut), (cut, stop)):
        some, many = (x[..., hi] - x[..., lo] for x in sums)
        read = read | (many > COLUMNS * some)
    return read
