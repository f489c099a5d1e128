"""What `merge` and `dedup` share: match entries with the most similar older one, and join pairs."""

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
    """By which vectors entries are compared, and what stays of a pair."""

    match: Match = "rotated"
    shared: bool = False  # whether one comparison serves all heads
    newest: bool = True  # whether the newest one's key and position stay, or the oldest's
    mean: bool = False  # whether the mean value stays, with + log m, or the value of that one


def slots_within(
    policy: str, budget: Size, sink: int, newest: int, shape: Shape, prompt: int
) -> int:
    """Slots of a bounded cache; raises if the budget leaves no entry to merge into."""
    slots = checked_capacity(policy, budget, shape, prompt, sink, newest)
    protected = (sink + newest) * shape.tokens_per_frame + shape.max_pass_tokens
    if slots - prompt - protected < 1:
        raise TachyscopeError(
            f"cache policy {policy!r}: budget={budget} leaves no entry to merge into beside "
            f"the protected ones: raise it by at least one entry"
        )
    return slots


def partner_tensors(batch: int, heads: int, slots: int, device: torch.device) -> Tensors:
    """The slot of every entry's most similar older entry, and the cosine of the two."""
    slot = (batch, heads, slots)
    return {
        "partner": PerSlot(torch.zeros(slot, dtype=torch.int64, device=device)),
        "alike": PerSlot(torch.full(slot, -math.inf, dtype=torch.float32, device=device)),
    }


def keep_within(how: Matching, p: LayerPass, n: int, budget: int, first: int, newest: int) -> int:
    """Append n entries to the past, and join the most similar pairs until it is within `budget`.

    Entries before slot `first` and the `newest` last ones are not touched. Returns the past's
    entries.
    """
    shape, past = p.ctx.shape, p.ctx.past
    total = past + n
    kept = budget - shape.max_pass_tokens
    old = slice(first, max(first, total - newest))
    matched = max(0, past - newest - first)  # of old, at earlier commits
    width = shape.head_dim * (2 if how.match == "key_value" else 1)
    pairs = shape.batch * (old.stop - first - matched) * (old.stop - first)
    p.work.macs += pairs * shape.kv_heads * width
    merged = _join(how, p.layer, old, matched, total, max(0, total - kept))
    if merged is not None and p.on_merge is not None:
        p.on_merge(p.ctx, *(x.long() + first for x in merged))
    return min(total, kept)


def _join(
    how: Matching, layer: KVStore, old: slice, matched: int, total: int, excess: int
) -> tuple[Tensor, Tensor] | None:
    """Match the entries of old behind the first `matched`, then join `excess` pairs of old.

    Returns the entries that were merged and those they were merged into, as they were numbered in
    old before.
    """
    partner, alike = (layer.own["cache"][name][:, :, old] for name in ("partner", "alike"))
    compared = vectors(how, layer, old)
    if matched < partner.shape[2]:
        found = best_older(compared, matched, how.shared)
        alike[:, :, matched:], partner[:, :, matched:] = found
    if not excess:
        return None
    merged = layer.merge(slice(old.start, total), alike, partner, excess, how.newest, how.mean)
    # a partner may have been merged into another entry, or have another key now
    stay = slice(0, partner.shape[2] - excess)
    measure(compared, partner[:, :, stay], alike[:, :, stay], how.shared)
    return merged


def vectors(how: Matching, layer: KVStore, slots: slice) -> list[Tensor]:
    """The vectors whose mean cosine is the similarity of two entries."""
    names = {"rotated": ("k",), "unrotated": ("unrotated",), "key_value": ("unrotated", "v")}
    return [layer.directions(name, slots) for name in names[how.match]]
