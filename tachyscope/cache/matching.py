"""Entries that recur: find the most alike older one, join the two, keep within a budget.

`merge` and `dedup` share it: they differ in what is left of entries that join.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tachyscope.cache import checked_capacity
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.types import Shape, Size
from tachyscope.kernels.match import best_older, measure
from tachyscope.store import KVStore, LayerPass, PerSlot, Tensors

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


def partner_tensors(batch: int, heads: int, slots: int, device: torch.device) -> Tensors:
    """For every slot its most alike older entry, and how alike the two are."""
    slot = (batch, heads, slots)
    return {
        "partner": PerSlot(torch.zeros(slot, dtype=torch.int64, device=device)),
        "alike": PerSlot(torch.full(slot, -math.inf, dtype=torch.float32, device=device)),
    }


def keep_within(how: Matching, p: LayerPass, n: int, budget: int, first: int, newest: int) -> int:
    """Take n entries of now into the past, and let the most alike join until `budget` holds.

    Entries before slot `first` and the `newest` last ones are not touched. Returns the entries of
    the past after.
    """
    shape, past = p.ctx.shape, p.ctx.past
    total = past + n
    kept = budget - shape.max_pass_tokens
    old = slice(first, max(first, total - newest))
    left = max(0, past - newest - first)  # of old, those matched at earlier commits
    looking = old.stop - first - left  # those that look for a partner now
    width = shape.head_dim * (2 if how.match == "key_value" else 1)
    pairs = shape.batch * looking * (old.stop - first)
    p.work.macs += pairs * shape.kv_heads * width
    merged = _join(how, p.layer, old, left, total, max(0, total - kept))
    if merged is not None and p.on_merge is not None:
        p.on_merge(p.ctx, *(x.long() + first for x in merged))
    return min(total, kept)


def _join(
    how: Matching, layer: KVStore, old: slice, left: int, total: int, excess: int
) -> tuple[Tensor, Tensor] | None:
    """Match entries from `left` of old on, then join `excess` of old and close the gaps.

    Returns who joined whom, counted from the first old one before the join.
    """
    partner, alike = (layer.own["cache"][name][:, :, old] for name in ("partner", "alike"))
    compared = vectors(how, layer, old)
    if left < partner.shape[2]:
        alike[:, :, left:], partner[:, :, left:] = best_older(compared, left, how.shared)
    if not excess:
        return None
    merged = layer.merge(slice(old.start, total), alike, partner, excess, how.newest, how.mean)
    # an heir is another entry than the one that was measured, and its key may have changed
    stay = slice(0, partner.shape[2] - excess)
    measure(compared, partner[:, :, stay], alike[:, :, stay], how.shared)
    return merged


def vectors(how: Matching, layer: KVStore, slots: slice) -> list[Tensor]:
    """The vectors whose mean cosine tells how alike two entries are."""
    names = {"rotated": ("k",), "unrotated": ("unrotated",), "key_value": ("unrotated", "v")}
    return [layer.directions(name, slots) for name in names[how.match]]
