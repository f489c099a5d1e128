"""Keep the first latent frames, two running means of all that left, and the newest (MemRoPE)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch

from tachyscope.cache import (
    CachePolicy,
    checked_capacity,
    set_times,
)
from tachyscope.core.limits import ENTRIES, LATENTS, SHARE
from tachyscope.core.policy import setting
from tachyscope.core.types import Shape, Size
from tachyscope.store import KVStore, LayerPass
from tachyscope_lab.rivals.whole_frames import check_whole_frames

MEMORY = 2  # latent frames of memory: the long-term one, then the short-term one


@final
@dataclass(frozen=True)
class MemRope(CachePolicy, name="memrope"):
    """Keep `sink` first latent frames, two frames of memory and the newest that fit the budget.

    What leaves the window goes into both memories, keys before RoPE and values: memory · (1 - rate)
    + mean of what leaves · rate. Sink and memory stand right before the window, so that positions
    are those of a video as long as the cache.
    """

    budget: Size = setting(
        Size(12, True),
        "Most entries that a layer holds, the present chunk included: latent frames (12f), or "
        "entries of whole ones.",
        bound=ENTRIES,
    )
    sink: int = setting(3, "First latent frames that are always kept.", bound=LATENTS)
    long: float = setting(0.01, "Rate of the long-term memory, from 0 to 1.", bound=SHARE)
    short: float = setting(0.1, "Rate of the short-term memory, from 0 to 1.", bound=SHARE)
    average: Literal["all", "place"] = setting(
        "all",
        "What leaves is averaged over all its entries (all), or a mean for every place of a frame "
        "(place).",
    )

    paper: ClassVar[str] = "MemRoPE, arXiv 2603.12513"
    whole_frames: ClassVar[bool] = True
    keeps_unrotated: ClassVar[bool] = True
    traceable: ClassVar[bool] = False

    def capacity(self, shape: Shape, prompt: int, frames: int | None) -> int:
        slots = checked_capacity("memrope", self.budget, shape, prompt, self.sink, MEMORY)
        if shape.token_by_token:
            return slots - (slots - prompt) % shape.tokens_per_frame
        check_whole_frames("memrope", self.budget, shape)
        return slots

    def commit(self, p: LayerPass, n: int) -> int:
        layer, ctx = p.layer, p.ctx
        shape, total = ctx.shape, ctx.past + n
        tokens = shape.tokens_per_frame
        keep = self.capacity(shape, ctx.prompt, None) - shape.max_pass_tokens
        if total <= keep:
            return total
        first = ctx.prompt + self.sink * tokens
        window = first + MEMORY * tokens
        # until something has left there is no memory: its slots hold the oldest frames, which leave
        begun = ctx.total > ctx.past
        leaving = slice(window if begun else first, window + total - keep)
        rates = {first: self.long, first + tokens: self.short}
        shares = {slot: rate if begun else 1.0 for slot, rate in rates.items()}
        self._remember(layer, leaving, tokens, shares)
        entries = shape.batch * shape.kv_heads * (leaving.stop - leaving.start)
        p.work.macs += 2 * entries * shape.head_dim
        layer.move(leaving.stop, window, keep - window)
        before = slice(ctx.prompt, window)
        newest = layer.pos[:, :, total - 1 : total, 0]
        time = newest + 1 - (keep - ctx.prompt) // tokens
        set_times(layer, before, time, tokens, p.rotate)
        return keep

    def _remember(
        self, layer: KVStore, source: slice, tokens: int, shares: Mapping[int, float]
    ) -> None:
        """Bring unrotated keys and values of frames nearer to the mean of slots that leave.

        `shares` says by how much, by the frame's first slot.
        """
        for name in ("unrotated", "v"):
            leaving = layer.vectors(name, source)
            wide = torch.promote_types(leaving.dtype, torch.float32)
            mean = leaving.to(wide).unflatten(2, (-1, tokens)).mean(2)
            if self.average == "all":
                mean = mean.mean(2, keepdim=True).expand_as(mean)
            for start, share in shares.items():
                span = slice(start, start + tokens)
                x = layer.vectors(name, span).to(wide).lerp(mean, share)
                layer.put(name, span, x.to(leaving.dtype))
