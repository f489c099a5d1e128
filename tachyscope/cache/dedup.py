"""Keep what recurs across frames once: its newest entry, at weight one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch

from tachyscope.cache import CachePolicy, OnMerge, Rotate
from tachyscope.cache.matching import Matching, keep_within, partner_tensors, slots_within
from tachyscope.meter import Meter
from tachyscope.settings import check_settings, setting
from tachyscope.store import KVStore, Tensors
from tachyscope.types import PassContext, Shape, Size

NEWEST = Matching()


@final
@dataclass(frozen=True)
class Dedup(CachePolicy):
    """Of entries with alike rotated keys keep the newest, as it was.

    Entries that leave the `newest` latent frames look for the most alike older entry. At every
    commit, exactly as many of the most alike pairs as exceed the budget become one entry: the newer
    of the two. `merge` would average their values, which blurs what is drawn again and again.
    """

    budget: Size = setting(
        Size(21, True),
        "Most entries that a layer holds, the present chunk included: latent frames (21f) or "
        "entries (1344).",
    )
    sink: int = setting(1, "First latent frames that are never dropped.")
    newest: int = setting(1, "Latest latent frames that are never dropped.")

    paper: ClassVar[str] = "after FAST-AR's TempCache, arXiv 2602.01801"

    def __post_init__(self) -> None:
        check_settings(self, "cache", "dedup")

    def cache_heads(self, shape: Shape) -> int:
        return shape.kv_heads

    def capacity(self, shape: Shape, prompt: int, frames: int | None) -> int:
        return slots_within("dedup", self.budget, self.sink, self.newest, shape, prompt)

    def tensors(self, shape: Shape, slots: int, device: torch.device) -> Tensors:
        return partner_tensors(shape.batch, shape.kv_heads, slots, device)

    def commit(
        self,
        layer: KVStore,
        ctx: PassContext,
        n: int,
        rotate: Rotate,
        meter: Meter,
        on_merge: OnMerge | None = None,
    ) -> int:
        tokens = ctx.shape.tokens_per_frame
        first, budget = ctx.prompt + self.sink * tokens, self.budget.entries(ctx.shape)
        newest = self.newest * tokens
        return keep_within(NEWEST, layer, ctx, n, budget, first, newest, meter, on_merge)
