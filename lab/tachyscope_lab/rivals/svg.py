"""Each head reads the newest entries, or its own place through time (Sparse VideoGen)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from tachyscope.attention.blocks import DENSE_LAYERS, DENSE_PASSES, BlockAttention, default_block
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.limits import PART, SHARE, Bound
from tachyscope.core.policy import setting
from tachyscope.core.types import PassContext, Shape
from tachyscope.store import KVStore, LayerPass, Tensors
from tachyscope_lab.rivals.block_lists import check_frames, tile_runs

SAMPLED = 64  # queries whose attention is worked out under both masks


@final
@dataclass(frozen=True)
class Svg(BlockAttention, name="svg"):
    """A head is spatial, and reads the newest blocks, or temporal, and reads places near its own.

    Both read the first latent frame. In a chunk's first sparse pass the attention of sampled
    queries is worked out over everything and under either mask; each head takes the mask of less
    error, and keeps it for the chunk's other passes.
    """

    read: float = setting(
        0.3,
        "Share of the past's blocks that a tile of queries reads, over 0 and at most 1; the first "
        "latent frame counts inside.",
        bound=PART,
    )
    block: int | None = setting(
        None,
        "Entries, and queries, of a block of the masks; unless given the largest power of two "
        "within a twelfth of a latent frame, at most 128.",
        bound=Bound(1, 4_096),
    )
    dense_passes: float = setting(0.2, DENSE_PASSES, bound=SHARE)
    dense_layers: float = setting(0.025, DENSE_LAYERS, bound=SHARE)

    paper: ClassVar[str] = "Sparse VideoGen, arXiv 2502.01776"

    def check(self, shape: Shape, prompt: int, slots: int | None) -> None:
        block = self._block(shape)
        check_frames("svg", shape, block)
        if slots is None:
            return
        sink = -(-shape.tokens_per_frame // block)
        count = -(-(slots - shape.max_pass_tokens) // block)
        if self.read * count < sink - 0.5:
            raise TachyscopeError(
                f"attention policy 'svg': read={self.read:g} of {count} past blocks is less than "
                f"the {sink} of the first latent frame: raise read to {sink / count:.2g}"
            )

    def _block(self, shape: Shape) -> int:
        return default_block(shape, self.block)

    def tensors(self, shape: Shape, slots: int, device: torch.device) -> Tensors:
        seeded = torch.Generator().manual_seed(0)
        draw = torch.rand(1, 1, SAMPLED, generator=seeded, dtype=torch.float32)
        # where in a pass the sampled queries stand, from 0 to 1
        return {**super().tensors(shape, slots, device), "sample": draw.to(device)}

    def attend(self, p: LayerPass, q: Tensor) -> Tensor:
        ctx = p.ctx
        if self._reads_all(ctx):
            return self._attend_all(p, q)
        block = self._block(ctx.shape)
        count, sink = (-(-n // block) for n in (ctx.past, ctx.shape.tokens_per_frame))
        # while a bounded cache fills, it holds too little to leave much out
        full = count if ctx.room is None else -(-ctx.room // block)
        most = min(count, max(sink, round(self.read * full)))
        if self._chooses(ctx):
            self._choose(p, q, most, min(sink, count))
        return self._read_blocks(p, q, most)

    def _choose(self, p: LayerPass, q: Tensor, most: int, sink: int) -> None:
        """Write to the map the blocks of the mask that serves each head better."""
        layer, ctx = p.layer, p.ctx
        layer.scratch = ()
        own, heads = layer.own["attention"], q.shape[1]
        distance = self._distance(layer, ctx)
        count = distance.shape[3]
        number = torch.arange(count, device=q.device)
        # of places equally near the newest first
        rank = distance[..., sink:] * count - number[sink:]
        near = rank.topk(most - sink, -1, largest=False).indices + sink
        first = number[:sink].expand(*near.shape[:3], -1)
        temporal = torch.cat([first, near], -1).repeat_interleave(heads // near.shape[1], 1)
        spatial = torch.cat([number[:sink], number[count - (most - sink) :]]).expand_as(temporal)
        errors = self._errors(p, q, (spatial, temporal), count)
        better = (errors[1] < errors[0])[..., None, None]
        tiles = near.shape[2]
        own["map"][:, :, :tiles, :most] = torch.where(better, temporal, spatial)
        own["count"][:, :, :tiles] = most

    def _distance(self, layer: KVStore, ctx: PassContext) -> Tensor:
        """Places between a tile's queries and a block's entries, [B, Hkv or 1, tiles, blocks]."""
        frame, block = ctx.shape.tokens_per_frame, self._block(ctx.shape)
        start, rows = tile_runs(ctx.tokens, block, frame, layer.pos.device)
        pos = layer.pos[:, :, None, None, : ctx.past].long()
        place = pos[..., 1] * ctx.shape.grid[1] + pos[..., 2]
        low = (start % frame).unsqueeze(-1)
        high = low + rows.unsqueeze(-1) - 1
        away = (low - place).clamp(min=0) + (place - high).clamp(min=0)
        away = away.masked_fill(rows.unsqueeze(-1) == 0, frame).amin(2)
        away = pad(away, (0, -ctx.past % block), value=frame)
        nearest: Tensor = away.unflatten(-1, (-1, block)).amin(-1)
        return nearest

    def _errors(
        self, p: LayerPass, q: Tensor, masks: tuple[Tensor, Tensor], count: int
    ) -> list[Tensor]:
        """Each mask's mean squared error [B, H] at sampled queries; masks as [B, H, tiles, ids]."""
        layer, ctx = p.layer, p.ctx
        wide, block = torch.promote_types(q.dtype, torch.float32), self._block(ctx.shape)
        rows = (layer.own["attention"]["sample"][0, 0] * ctx.tokens).long()
        k, v, weights = layer.read(ctx, slice(0, ctx.end), log_count=self.log_weights(p))
        assert weights is not None
        group = q.shape[1] // k.shape[1]
        k, v, weights = (x.repeat_interleave(group, 1).to(wide) for x in (k, v, weights))
        scores = q[:, :, rows].to(wide) @ k.mT / math.sqrt(q.shape[3]) + weights.unsqueeze(2)
        p.work.macs += (2 + len(masks)) * scores.numel() * q.shape[3]
        exact = scores.softmax(-1) @ v
        errors = []
        for ids in masks:
            listed = ids[:, :, rows // block]
            left_out = torch.ones(*listed.shape[:3], count, dtype=torch.bool, device=q.device)
            left_out.scatter_(3, listed, False)
            left_out = left_out.repeat_interleave(block, 3)[..., : ctx.past]
            left_out = pad(left_out, (0, ctx.end - ctx.past))
            masked = scores.masked_fill(left_out, -math.inf).softmax(-1) @ v
            errors.append((masked - exact).square().mean((2, 3)))
        return errors
