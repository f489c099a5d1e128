"""Merge entries that recur across frames (TempCache), within a hard budget or by a threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from tachyscope.cache import CachePolicy, Rotate, checked_capacity, clamp_distance, shift_slots
from tachyscope.errors import TachyscopeError
from tachyscope.kernels import gpu
from tachyscope.kernels.device import has_kernel
from tachyscope.kernels.match import alike_features, best_older
from tachyscope.kernels.merge import fold, roots
from tachyscope.meter import Meter
from tachyscope.settings import check_settings, setting
from tachyscope.types import LayerCache, PassContext, Shape, Size


@final
@dataclass(frozen=True)
class Merge(CachePolicy):
    """Let one entry stand for alike ones.

    Budget form: entries that leave the `newest` latent frames look for the most alike older entry;
    at every commit exactly as many of the most alike as exceed the budget are folded into theirs,
    and one whose partner is itself folded passes on to the partner's. `sink` first frames and
    the `newest` are never touched.

    Threshold form (the paper's): each query of the finished chunk names its top-1 past key; where
    the two keys' cosine is at least `threshold` the new entry joins it. Nothing bounds the cache.

    match: on which vectors entries are compared. keep: whose key and position stand for a group.
    others: "folded" into the kept one they leave it a mean value and + log m on its score, exact
    where keys are equal; "dropped" they leave it as it is.
    heads: "shared" compares by the mean over heads, so that all heads keep the same entries.
    max_distance: an entry further back than so many latent frames before the next chunk stands at
    that distance.
    """

    budget: Size | None = setting(
        None,
        "Most entries that a layer holds, the present chunk included: latent frames (21f) or "
        "entries (1344); 21f unless a threshold is given.",
        instead_of=("threshold",),
    )
    threshold: float | None = setting(
        None,
        "Merge a new entry with the past entry that its query attends to most where the cosine of "
        "their keys is at least this, from -1 to 1; the cache then has no bound.",
        instead_of=("budget", "newest", "others"),
    )
    sink: int | None = setting(
        None, "First latent frames that are never merged; 1 with a budget, 0 with a threshold."
    )
    newest: int | None = setting(
        None, "Latest latent frames that are never merged; 1 with a budget, 0 with a threshold."
    )
    match: Literal["rotated", "unrotated", "key_value"] = setting(
        "rotated",
        "What two entries are compared by: keys after RoPE (rotated), keys before RoPE "
        "(unrotated), or keys before RoPE and values (key_value).",
    )
    keep: Literal["partner", "newest"] = setting(
        "newest",
        "Whose key and position stand for merged entries: the newest one's, or those of the older "
        "entry that the others were matched with (partner).",
    )
    others: Literal["folded", "dropped"] = setting(
        "folded",
        "What becomes of the other entries of a merge: folded leaves their mean value and the log "
        "of their number on the score, dropped leaves nothing.",
    )
    heads: Literal["shared", "each"] = setting(
        "each", "Whether each head merges on its own, or all by one comparison (shared)."
    )
    max_distance: int | None = setting(
        None,
        "Latent frames before the next chunk: an entry further back gets the position at that "
        "distance; needs match=unrotated or key_value.",
    )

    paper: ClassVar[str] = "FAST-AR's TempCache, arXiv 2602.01801"

    def __post_init__(self) -> None:
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
        check_settings(self, "cache", "merge")
        if self.max_distance is not None and self.match == "rotated":
            raise TachyscopeError(
                f"cache policy 'merge': max_distance turns keys, so that they "
                f"cannot be compared rotated, got max_distance={self.max_distance},"
                f"match={self.match}: set match=unrotated"
            )
        if not by_budget and self.others == "dropped":
            raise TachyscopeError(
                "cache policy 'merge': others=dropped goes with a budget, got a threshold: "
                "leave it out, or give a budget instead"
            )
        if not by_budget and self._newest:
            raise TachyscopeError(
                f"cache policy 'merge': with a threshold new entries are merged at once, so newest "
                f"must be 0, got {self.newest}: leave it out, or give a budget instead"
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
    def grows(self) -> bool:
        return self.threshold is not None

    @property
    def merges(self) -> bool:
        return self.others == "folded"

    @property
    def wants_queries(self) -> bool:
        return self.budget is None  # their top-1 names an entry's partner

    @property
    def keeps_unrotated(self) -> bool:
        return self.match != "rotated"

    def cache_heads(self, shape: Shape) -> int:
        return 1 if self.heads == "shared" else shape.kv_heads

    def capacity(self, shape: Shape, prompt: int, frames: int | None) -> int:
        if self.budget is None:
            return prompt + 8 * shape.max_pass_tokens
        slots = checked_capacity("merge", self.budget, shape, prompt, self._sink, self._newest)
        protected = (self._sink + self._newest) * shape.tokens_per_frame + shape.max_pass_tokens
        if slots - prompt - protected < 1:
            raise TachyscopeError(
                f"cache policy 'merge': budget={self.budget} leaves no entry to merge into beside "
                f"the protected ones: raise it by at least one entry"
            )
        return slots

    def tensors(self, shape: Shape, slots: int, device: torch.device) -> dict[str, Tensor]:
        if self.budget is None:
            return {}
        slot = (shape.batch, self.cache_heads(shape), slots)
        return {
            "slot_partner": torch.zeros(slot, dtype=torch.int64, device=device),
            "slot_alike": torch.full(slot, -math.inf, dtype=torch.float32, device=device),
        }

    def commit(
        self, layer: LayerCache, ctx: PassContext, n: int, rotate: Rotate, meter: Meter
    ) -> int:
        first, total = ctx.prompt + self._sink * ctx.shape.tokens_per_frame, ctx.past + n
        newest = layer.pos[:, :, total - 1 : total, 0].clone()
        if self.budget is None:
            past = self._by_threshold(layer, ctx, n, min(first, ctx.past), meter)
        else:
            past = self._by_budget(layer, ctx, n, first, meter)
        if self.max_distance is not None:
            clamp_distance(layer, past, newest + 1 - self.max_distance, rotate)
        return past

    def _features(self, layer: LayerCache, entries: slice) -> Tensor:
        shared = self.heads == "shared"
        if self.match == "rotated":
            return alike_features(layer.k[:, :, entries], shared)
        assert layer.unrotated is not None
        keys = alike_features(layer.unrotated[:, :, entries], shared)
        if self.match == "unrotated":
            return keys
        values = alike_features(layer.v[:, :, entries], shared)
        return torch.cat([keys, values], -1).div_(math.sqrt(2))

    def _by_budget(
        self, layer: LayerCache, ctx: PassContext, n: int, first: int, meter: Meter
    ) -> int:
        assert self.budget is not None
        total, kept = ctx.past + n, self.budget.entries(ctx.shape) - ctx.shape.max_pass_tokens
        protected = self._newest * ctx.shape.tokens_per_frame
        old = slice(first, max(first, total - protected))
        left = max(0, ctx.past - protected - first)  # of old, those matched at earlier commits
        rows = old.stop - first - left  # those that look for a partner now
        width = ctx.shape.head_dim * (2 if self.match == "key_value" else 1)
        pairs = ctx.shape.batch * rows * (old.stop - first)
        meter.add("macs", pairs * ctx.shape.kv_heads * width)
        by_budget = self._on_gpu if self._kernels_suit(layer) else self._on_torch
        by_budget(layer, old, left, total, max(0, total - kept))
        return min(total, kept)

    def _kernels_suit(self, layer: LayerCache) -> bool:
        by_head = self.heads == "each" and self.match != "key_value"
        return by_head and has_kernel(layer.k.device, layer.k.dtype, layer.k.shape[3])

    def _on_gpu(self, layer: LayerCache, old: slice, left: int, total: int, excess: int) -> None:
        """As `_on_torch`, by kernels; nothing as large as the keys is made."""
        keys = layer.k if self.match == "rotated" else layer.unrotated
        assert keys is not None
        partner, alike = (layer.extra[name][:, :, old] for name in ("slot_partner", "slot_alike"))
        if left < partner.shape[2]:
            alike[:, :, left:], partner[:, :, left:] = gpu.match.match(keys[:, :, old], left)
        if not excess:
            return
        folds = gpu.folding.choose(alike, partner, excess)
        used = slice(old.start, total)
        entries = {name: x[:, :, used] for name, x in layer.entries().items()}
        held = gpu.folding.Entries(**entries)
        gpu.folding.fold_groups(held, folds, self.keep == "newest", self.others == "folded")
        gpu.folding.slide(held, folds)
        survivors = partner.shape[2] - excess
        partner[:, :, :survivors] = folds.heir.view_as(partner[:, :, :survivors])
        gpu.match.measure(keys[:, :, old], partner[:, :, :survivors], alike[:, :, :survivors])

    def _on_torch(self, layer: LayerCache, old: slice, left: int, total: int, excess: int) -> None:
        """Match entries from `left` of old on, then fold `excess` of old and close the gaps."""
        partner, alike = (layer.extra[name][:, :, old] for name in ("slot_partner", "slot_alike"))
        if left < partner.shape[2]:
            alike[:, :, left:], partner[:, :, left:] = best_older(self._features(layer, old), left)
        if not excess:
            return
        source = alike.topk(excess, 2).indices
        parent = torch.arange(partner.shape[2], device=partner.device).expand_as(partner)
        parent = parent.scatter(2, source, partner.gather(2, source))
        root = roots(parent)
        self._fold(layer, old, source, root.gather(2, source))
        survivors = partner.shape[2] - excess
        self._compact(layer, old, source, root, survivors)
        shift_slots(layer, old.stop, old.start + survivors, total - old.stop)

    def _fold(self, layer: LayerCache, entries: slice, source: Tensor, root: Tensor) -> None:
        """Fold entries `source` into `root` [B, G, e], both counted from the slice's start."""
        folded = self.others == "folded"
        v, log_count = layer.v[:, :, entries], layer.log_count[:, :, entries]
        joined = fold(v, log_count, source, root) if folded else None
        if self.keep == "newest":
            self._take_newest(layer, entries, source, root)
        if joined is not None:
            v.copy_(joined[0])
            log_count.copy_(joined[1])

    def _take_newest(self, layer: LayerCache, entries: slice, source: Tensor, root: Tensor) -> None:
        """Give every root its newest member's key and position, and value where none is folded."""
        slots = torch.arange(layer.pos[:, :, entries].shape[2], device=root.device)
        order = layer.pos[:, :, entries, 0].long() * len(slots) + slots
        newest = order.scatter_reduce(2, root, order.gather(2, source), "amax")
        member = newest.gather(2, root) % len(slots)
        taken = (
            ("k", "unrotated", "pos") if self.others == "folded" else ("k", "unrotated", "pos", "v")
        )
        for name, x in layer.entries().items():
            if name in taken:
                part = x[:, :, entries]
                index = root.expand(-1, x.shape[1], -1).unsqueeze(-1)
                part.scatter_(2, index.expand(-1, -1, -1, x.shape[3]), _take(part, member))

    def _compact(
        self, layer: LayerCache, old: slice, source: Tensor, root: Tensor, survivors: int
    ) -> None:
        """Close the gaps that sources leave, and let partners point where theirs went."""
        gone = torch.zeros_like(root, dtype=torch.bool).scatter_(2, source, True)
        order = gone.to(torch.int8).argsort(dim=2, stable=True)[:, :, :survivors]
        slot_now = (~gone).long().cumsum(2) - 1
        partner = layer.extra["slot_partner"][:, :, old]
        # a partner that was folded away has passed on to its root, older still
        heir = slot_now.gather(2, root.gather(2, partner))
        kept = slice(old.start, old.start + survivors)
        for x in (*layer.entries().values(), layer.extra["slot_alike"]):
            x[:, :, kept] = _take(x[:, :, old], order)
        partner[:, :, :survivors] = heir.gather(2, order)
        # an heir is another entry than the one that was measured, and its key may have changed
        features = self._features(layer, kept)
        theirs = _take(features, partner[:, :, :survivors])
        layer.extra["slot_alike"][:, :, kept] = (features * theirs).sum(-1)
        layer.extra["slot_alike"][:, :, old.start] = -math.inf

    def _by_threshold(
        self, layer: LayerCache, ctx: PassContext, n: int, first: int, meter: Meter
    ) -> int:
        total = ctx.past + n
        if ctx.past == first:
            return total
        assert self.threshold is not None
        q, k = layer.extra["queries"][:, :, :n], layer.k[:, :, first : ctx.past]
        q = q.unflatten(1, (k.shape[1], -1)).sum(2)
        if self.heads == "shared":
            q, k = (x.transpose(1, 2).flatten(2).unsqueeze(1) for x in (q, k))
        live = layer.log_count[:, :, first : ctx.past].clamp(min=-1e30).unsqueeze(2)
        best = (q.float() @ k.float().mT / math.sqrt(ctx.shape.head_dim) + live).argmax(-1)
        meter.add("macs", q.shape[0] * n * (ctx.past - first) * q[0, :, 0].numel())
        everything = slice(first, total)
        features = self._features(layer, everything)
        past = ctx.past - first
        cosine = (features[:, :, past:] * _take(features, best)).sum(-1)
        new = torch.arange(past, total - first, device=best.device).expand_as(best)
        root = torch.where(cosine >= self.threshold, best, new)
        self._fold(layer, everything, new, root)
        return first + self._close_gaps(layer, everything)

    def _close_gaps(self, layer: LayerCache, entries: slice) -> int:
        """Bring live entries to the front; how many slots are in use after.

        The number is data. On CUDA the host does not look: empty slots stay in use there.
        """
        empty = layer.log_count[:, :, entries] == -math.inf
        order = empty.to(torch.int8).argsort(dim=2, stable=True)
        for x in layer.entries().values():
            x[:, :, entries] = _take(x[:, :, entries], order)
        if empty.is_cuda:
            return empty.shape[2]
        return int((~empty).sum(2).max())


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Entries `index` [B, G, m] of x [B, H, n, ...]; G = 1 serves all heads."""
    index = index.expand(-1, x.shape[1], -1)
    if x.dim() == 4:
        index = index.unsqueeze(-1).expand(-1, -1, -1, x.shape[3])
    return x.gather(2, index)
