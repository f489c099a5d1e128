"""Merge entries that recur across frames (TempCache), within a hard budget or by a threshold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import torch

from tachyscope.cache import CachePolicy
from tachyscope.cache.matching import (
    Match,
    Matching,
    keep_within,
    partner_tensors,
    slots_within,
    vectors,
)
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.limits import ENTRIES, LATENTS, Bound
from tachyscope.core.policy import setting
from tachyscope.core.ranks import alone
from tachyscope.core.types import OptionalSizeSetting, Shape, Size
from tachyscope.kernels.device import host_may_read
from tachyscope.kernels.entries import take
from tachyscope.kernels.match import features
from tachyscope.store import KVStore, LayerPass, Tensors


@final
@dataclass(frozen=True)
class Merge(CachePolicy, name="merge"):
    """Merge similar entries: m of them become one with their mean value and + log m on its score.

    If their keys are equal, attention is unchanged, exactly.

    Budget form: an entry that leaves the `newest` latent frames is matched with the most similar
    older entry; at every commit the most similar pairs are merged, exactly as many as exceed the
    budget, and an entry whose partner is itself merged goes to the partner's. The first `sink`
    frames and the `newest` are never touched.

    Threshold form (the paper's): the query of each new entry chooses its top-1 past key; if the
    cosine of the two keys is at least `threshold`, the entry is merged into that one. The cache is
    unbounded.

    match: the vectors that are compared. keep: whose key and position stay. heads: "shared"
    compares by the mean over heads, so that all heads keep the same entries.
    """

    budget: OptionalSizeSetting = setting(
        None,
        "Most entries that a layer holds, the present chunk included: latent frames (21f) or "
        "entries (1344); 21f unless a threshold is given.",
        bound=ENTRIES,
        instead_of=("threshold",),
    )
    threshold: float | None = setting(
        None,
        "Merge a new entry with the past entry that its query attends to most where the cosine of "
        "their keys is at least this, from -1 to 1; the cache then has no bound.",
        bound=Bound(-1.0, 1.0),
        instead_of=("budget", "newest"),
    )
    sink: int | None = setting(
        None,
        "First latent frames that are never merged; 1 with a budget, 0 with a threshold.",
        bound=LATENTS,
    )
    newest: int | None = setting(
        None,
        "Latest latent frames that are never merged; 1 with a budget, 0 with a threshold.",
        bound=LATENTS,
    )
    match: Match = setting(
        "rotated",
        "What two entries are compared by: keys after RoPE (rotated), keys before RoPE "
        "(unrotated), or keys before RoPE and values (key_value).",
    )
    keep: Literal["partner", "newest"] = setting(
        "newest",
        "Whose key and position a merged entry has: the newest one's, or those of the older "
        "entry that the others were matched with (partner).",
    )
    heads: Literal["shared", "each"] = setting(
        "each", "Whether each head merges on its own, or all by one comparison (shared)."
    )
    paper: ClassVar[str] = "FAST-AR's TempCache, arXiv 2602.01801"
    splits_heads: ClassVar[bool] = True

    def check_settings(self) -> None:
        if self.budget is not None and self.threshold is not None:
            raise TachyscopeError(
                f"cache policy 'merge' takes a budget or a threshold, got budget={self.budget} and "
                f"threshold={self.threshold}: leave one out"
            )
        by_budget = self.threshold is None
        ours: dict[str, object] = {"budget": Size(21, True), "sink": 1, "newest": 1}
        theirs: dict[str, object] = {"sink": 0, "newest": 0}
        for name, value in (ours if by_budget else theirs).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if not by_budget and self._newest:
            raise TachyscopeError(
                f"cache policy 'merge': with a threshold new entries are merged at once, so newest "
                f"must be 0, got {self.newest}: leave it out, or give a budget instead"
            )

    def check_plan(self, plan: Mapping[str, Any], shape: Shape) -> None:
        super().check_plan(plan, shape)
        if shape.ranks > 1 and self.heads == "shared" and self.budget is not None:
            raise TachyscopeError(
                f"cache policy 'merge' with a budget and heads=shared compares all heads together, "
                f"and {shape.ranks} ranks hold some each: use heads=each"
            )

    @property
    def _sink(self) -> int:
        assert self.sink is not None
        return self.sink

    @property
    def _newest(self) -> int:
        assert self.newest is not None
        return self.newest

    @property
    def _matching(self) -> Matching:
        return Matching(self.match, self.heads == "shared", self.keep == "newest", mean=True)

    @property
    def grows(self) -> bool:
        return self.threshold is not None

    @property
    def merges(self) -> bool:
        return True

    @property
    def wants_queries(self) -> bool:
        return self.budget is None  # a query chooses its entry's partner

    @property
    def keeps_unrotated(self) -> bool:
        return self.match != "rotated"

    def cache_heads(self, shape: Shape) -> int:
        return 1 if self.heads == "shared" else shape.kv_heads

    def capacity(self, shape: Shape, prompt: int, frames: int | None) -> int:
        if self.budget is None:
            return prompt + 8 * shape.max_pass_tokens
        return slots_within("merge", self.budget, self._sink, self._newest, shape, prompt)

    def tensors(self, shape: Shape, slots: int, device: torch.device) -> Tensors:
        if self.budget is None:
            size = (shape.batch, shape.heads, shape.max_pass_tokens, shape.head_dim)
            return {"queries": torch.zeros(size, dtype=torch.float32, device=device)}
        return partner_tensors(shape.batch, self.cache_heads(shape), slots, device)

    def commit(self, p: LayerPass, n: int) -> int:
        ctx, tokens = p.ctx, p.ctx.shape.tokens_per_frame
        first = ctx.prompt + self._sink * tokens
        if self.budget is None:
            return self._by_threshold(p, n, min(first, ctx.past))
        budget, kept = self.budget.entries(ctx.shape), self._newest * tokens
        return keep_within(self._matching, p, n, budget, first, kept)

    def _by_threshold(self, p: LayerPass, n: int, first: int) -> int:
        layer, ctx = p.layer, p.ctx
        total = ctx.past + n
        if ctx.past == first:
            return total
        assert self.threshold is not None
        q, k = layer.own["cache"]["queries"][:, :, :n], layer.vectors("k", slice(first, ctx.past))
        q = q.unflatten(1, (k.shape[1], -1)).sum(2)
        mean = p.mean_heads if self.heads == "shared" else alone
        scale = math.sqrt(ctx.shape.head_dim)
        if self.heads == "shared":
            scale /= ctx.shape.ranks  # the mean over ranks is then the sum
            q, k = (x.transpose(1, 2).flatten(2).unsqueeze(1) for x in (q, k))
        live = layer.log_count[:, :, first : ctx.past].clamp(min=-1e30).unsqueeze(2)
        best = (mean(q.float() @ k.float().mT / scale) + live).argmax(-1)
        p.work.macs += q.shape[0] * n * (ctx.past - first) * q[0, :, 0].numel()
        everything = slice(first, total)
        compared = vectors(self._matching, layer, everything)
        normed, past = features(compared, self.heads == "shared"), ctx.past - first
        cosine = mean((normed[:, :, past:] * take(normed, best)).sum(-1))
        new = torch.arange(past, total - first, device=best.device).expand_as(best)
        root = torch.where(cosine >= self.threshold, best, new)
        layer.join(everything, new, root, self._matching.newest)
        if p.on_merge is not None:
            p.on_merge(ctx, new + first, root + first)
        return first + self._close_gaps(layer, everything)

    def _close_gaps(self, layer: KVStore, used: slice) -> int:
        """Move entries to the front of the slots; returns the slots in use.

        Their number depends on data, which the host does not read on CUDA: there all stay in use.
        """
        empty = layer.log_count[:, :, used] == -math.inf
        order = empty.to(torch.int8).argsort(dim=2, stable=True)
        layer.gather(used, order)
        if not host_may_read(empty):
            return empty.shape[2]
        return int((~empty).sum(2).max())
