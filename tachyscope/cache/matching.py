"""Entries that recur: find the most alike older one, join the two, keep within a budget.

`merge` and `dedup` share it: they differ in what is left of entries that join.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tachyscope.cache import checked_capacity, shift_slots
from tachyscope.errors import TachyscopeError
from tachyscope.kernels import gpu
from tachyscope.kernels.device import has_kernel
from tachyscope.kernels.match import alike_features, best_older
from tachyscope.kernels.merge import fold, roots
from tachyscope.meter import Meter
from tachyscope.types import LayerCache, PassContext, Shape, Size

Match = Literal["rotated", "unrotated", "key_value"]


@dataclass(frozen=True, slots=True)
class Matching:
    """By which vectors entries are compared, and what is left of those that join."""

    match: Match = "rotated"
    shared: bool = False  # all heads by one comparison
    newest: bool = True  # the newest member's key and position stay, else the oldest's
    mean: bool = False  # the mean value and + log m stay, else the value of the one that stays


def slots_within(
    policy: str, budget: Size, sink: int, newest: int, shape: Shape, prompt: int
) -> int:
    """Slots of a budget; raises where it cannot be kept."""
    slots = checked_capacity(policy, budget, shape, prompt, sink, newest)
    protected = (sink + newest) * shape.tokens_per_frame + shape.max_pass_tokens
    if slots - prompt - protected < 1:
        raise TachyscopeError(
            f"cache policy {policy!r}: budget={budget} leaves no entry to merge into beside "
            f"the protected ones: raise it by at least one entry"
        )
    return slots


def partner_tensors(batch: int, heads: int, slots: int, device: torch.device) -> dict[str, Tensor]:
    """For every slot its most alike older entry, and how alike the two are."""
    slot = (batch, heads, slots)
    return {
        "slot_partner": torch.zeros(slot, dtype=torch.int64, device=device),
        "slot_alike": torch.full(slot, -math.inf, dtype=torch.float32, device=device),
    }


def keep_within(
    how: Matching,
    layer: LayerCache,
    ctx: PassContext,
    n: int,
    budget: int,
    first: int,
    newest: int,
    meter: Meter,
) -> int:
    """Take n entries of now into the past, and let the most alike join until `budget` holds.

    Entries before slot `first` and the `newest` last ones are not touched. Returns the entries of
    the past after.
    """
    shape, total = ctx.shape, ctx.past + n
    kept = budget - shape.max_pass_tokens
    old = slice(first, max(first, total - newest))
    left = max(0, ctx.past - newest - first)  # of old, those matched at earlier commits
    looking = old.stop - first - left  # those that look for a partner now
    width = shape.head_dim * (2 if how.match == "key_value" else 1)
    pairs = shape.batch * looking * (old.stop - first)
    meter.add("macs", pairs * shape.kv_heads * width)
    join = _join_on_gpu if kernels_suit(how, layer) else _join_in_torch
    join(how, layer, old, left, total, max(0, total - kept))
    return min(total, kept)


def kernels_suit(how: Matching, layer: LayerCache) -> bool:
    by_head = not how.shared and how.match != "key_value"
    return by_head and has_kernel(layer.k.device, layer.k.dtype, layer.k.shape[3])


def _join_on_gpu(
    how: Matching, layer: LayerCache, old: slice, left: int, total: int, excess: int
) -> None:
    """As `_join_in_torch`, by kernels; nothing as large as the keys is made."""
    keys = layer.k if how.match == "rotated" else layer.unrotated
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
    gpu.folding.fold_groups(held, folds, how.newest, how.mean)
    gpu.folding.slide(held, folds)
    survivors = partner.shape[2] - excess
    partner[:, :, :survivors] = folds.heir.view_as(partner[:, :, :survivors])
    gpu.match.measure(keys[:, :, old], partner[:, :, :survivors], alike[:, :, :survivors])


def _join_in_torch(
    how: Matching, layer: LayerCache, old: slice, left: int, total: int, excess: int
) -> None:
    """Match entries from `left` of old on, then join `excess` of old and close the gaps."""
    partner, alike = (layer.extra[name][:, :, old] for name in ("slot_partner", "slot_alike"))
    if left < partner.shape[2]:
        alike[:, :, left:], partner[:, :, left:] = best_older(features(how, layer, old), left)
    if not excess:
        return
    source = alike.topk(excess, 2).indices
    parent = torch.arange(partner.shape[2], device=partner.device).expand_as(partner)
    parent = parent.scatter(2, source, partner.gather(2, source))
    root = roots(parent)
    join_entries(how, layer, old, source, root.gather(2, source))
    survivors = partner.shape[2] - excess
    _compact(how, layer, old, source, root, survivors)
    shift_slots(layer, old.stop, old.start + survivors, total - old.stop)


def features(how: Matching, layer: LayerCache, entries: slice) -> Tensor:
    """Vectors whose dot product tells how alike two entries are."""
    if how.match == "rotated":
        return alike_features(layer.k[:, :, entries], how.shared)
    assert layer.unrotated is not None
    keys = alike_features(layer.unrotated[:, :, entries], how.shared)
    if how.match == "unrotated":
        return keys
    values = alike_features(layer.v[:, :, entries], how.shared)
    return torch.cat([keys, values], -1).div_(math.sqrt(2))


def join_entries(
    how: Matching, layer: LayerCache, entries: slice, source: Tensor, root: Tensor
) -> None:
    """Join entries `source` with `root` [B, G, e], both counted from the slice's start."""
    v, log_count = layer.v[:, :, entries], layer.log_count[:, :, entries]
    joined = fold(v, log_count, source, root) if how.mean else None
    if how.newest:
        _take_newest(how, layer, entries, source, root)
    if joined is not None:
        v.copy_(joined[0])
        log_count.copy_(joined[1])


def _take_newest(
    how: Matching, layer: LayerCache, entries: slice, source: Tensor, root: Tensor
) -> None:
    """Give every root its newest member's key and position, and value where it is no mean."""
    slots = torch.arange(layer.pos[:, :, entries].shape[2], device=root.device)
    order = layer.pos[:, :, entries, 0].long() * len(slots) + slots
    newest = order.scatter_reduce(2, root, order.gather(2, source), "amax")
    member = newest.gather(2, root) % len(slots)
    taken = ("k", "unrotated", "pos") if how.mean else ("k", "unrotated", "pos", "v")
    for name, x in layer.entries().items():
        if name in taken:
            part = x[:, :, entries]
            index = root.expand(-1, x.shape[1], -1).unsqueeze(-1)
            part.scatter_(2, index.expand(-1, -1, -1, x.shape[3]), take(part, member))


def _compact(
    how: Matching, layer: LayerCache, old: slice, source: Tensor, root: Tensor, survivors: int
) -> None:
    """Close the gaps that sources leave, and let partners point where theirs went."""
    gone = torch.zeros_like(root, dtype=torch.bool).scatter_(2, source, True)
    order = gone.to(torch.int8).argsort(dim=2, stable=True)[:, :, :survivors]
    slot_now = (~gone).long().cumsum(2) - 1
    partner = layer.extra["slot_partner"][:, :, old]
    # a partner that was joined has passed on to its root, older still
    heir = slot_now.gather(2, root.gather(2, partner))
    kept = slice(old.start, old.start + survivors)
    for x in (*layer.entries().values(), layer.extra["slot_alike"]):
        x[:, :, kept] = take(x[:, :, old], order)
    partner[:, :, :survivors] = heir.gather(2, order)
    # an heir is another entry than the one that was measured, and its key may have changed
    ours = features(how, layer, kept)
    theirs = take(ours, partner[:, :, :survivors])
    layer.extra["slot_alike"][:, :, kept] = (ours * theirs).sum(-1)
    layer.extra["slot_alike"][:, :, old.start] = -math.inf


def take(x: Tensor, index: Tensor) -> Tensor:
    """Entries `index` [B, G, m] of x [B, H, n, ...]; G = 1 serves all heads."""
    index = index.expand(-1, x.shape[1], -1)
    if x.dim() == 4:
        index = index.unsqueeze(-1).expand(-1, -1, -1, x.shape[3])
    return x.gather(2, index)
