"""Keep the newest of entries with similar keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch

from tachyscope.cache import CachePolicy
from tachyscope.cache.matching import Matching, keep_within, partner_tensors, slots_within
from tachyscope.core.limits import ENTRIES, LATENTS
from tachyscope.core.policy import setting
from tachyscope.core.types import Shape, Size, SizeSetting
from tachyscope.store import LayerPass, Tensors

NEWEST = Matching()


@final
@dataclass(frozen=True)
class Dedup(CachePolicy, name="dedup"):
    """Of entries with similar rotated keys keep the newest, unchanged.

    An entry that leaves the `newest` latent frames is matched with the most similar older entry. At
    every commit the older entries of the most similar pairs are dropped, exactly as many as exceed
    the budget. `merge` averages values instead, which blurs what is drawn again and again.
    """

    budget: SizeSetting = setting(
        Size(21, True),
        "Most entries that a layer holds, the present chunk included: latent frames (21f) or "
        "entries (1344).",
        bound=ENTRIES,
    )
    sink: int = setting(1, "First latent frames that are never dropped.", bound=LATENTS)
    newest: int = setting(1, "Latest latent frames that are never dropped.", bound=LATENTS)

    paper: ClassVar[str] = "after FAST-AR's TempCache, arXiv 2602.01801"
    splits_heads: ClassVar[bool] = True

    def cache_heads(self, shape: Shape) -> int:
        return shape.kv_heads

    def capacity(self, shape: Shape, prompt: int, frames: int | None) -> int:
        return slots_within("dedup", self.budget, self.sink, self.newest, shape, prompt)

    def tensors(self, shape: Shape, slots: int, device: torch.device) -> Tensors:
        return partner_tensors(shape.batch, shape.kv_heads, slots, device)

    def commit(self, p: LayerPass, n: int) -> int:
        tokens = p.ctx.shape.tokens_per_frame
        first, budget = p.ctx.prompt + self.sink * tokens, self.budget.entries(p.ctx.shape)
        return keep_within(NEWEST, p, n, budget, first, self.newest * tokens)
