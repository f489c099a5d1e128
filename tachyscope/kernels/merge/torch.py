"""Merge alike entries, by stock torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tachyscope.kernels.codes import decode
from tachyscope.kernels.codes.torch import encode
from tachyscope.kernels.entries import put, take
from tachyscope.kernels.slots import shift


class Entries(NamedTuple):
    """A stretch of a cache: k, v, unrotated [B, H, n, D], log_count [B, G, n], pos [B, G, n, 3].

    Codes have scales [B, H, n].
    """

    k: Tensor
    v: Tensor
    log_count: Tensor
    pos: Tensor
    unrotated: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    unrotated_scale: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        return [x for x in self if x is not None]

    def first(self, n: int) -> Entries:
        fields = {name: x[:, :, :n] for name, x in self._asdict().items() if x is not None}
        return Entries(**fields)


def merge_entries(
    held: Entries, alike: Tensor, partner: Tensor, excess: int, newest: bool, mean: bool
) -> tuple[Tensor, Tensor]:
    """Fold the `excess` most alike of the first n entries into their partners; close the gaps.

    alike, partner [B, G, n], G = H or 1; a partner is older, and the first entry has none and is
    never folded. One whose partner is itself folded passes on to the partner's. What is held may
    go on behind the n entries, and follows. With `mean` who stays gets its group's weight and mean
    value; with `newest` the key and position of its newest member, and without `mean` its value.
    Partners then point to where theirs went. Returns who was folded and into whom, [B, G, excess],
    both counted before.
    """
    n = alike.shape[2]
    stay = n - excess
    source = alike.topk(excess, 2).indices
    parent = torch.arange(n, device=partner.device).expand_as(partner)
    end = roots(parent.scatter(2, source, partner.gather(2, source)))
    root = end.gather(2, source)
    join_entries(held.first(n), source, root, newest, mean)
    gone = torch.zeros_like(end, dtype=torch.bool).scatter_(2, source, True)
    order = gone.to(torch.int8).argsort(dim=2, stable=True)[:, :, :stay]
    slot_now = (~gone).long().cumsum(2) - 1
    # a partner that was folded has passed on to its root, older still
    heir = slot_now.gather(2, end.gather(2, partner))
    for x in held.tensors():
        x[:, :, :stay] = take(x[:, :, :n], order)
        shift(x, n, stay, x.shape[2] - n)
    partner[:, :, :stay] = heir.gather(2, order)
    return source, root


def join_entries(held: Entries, source: Tensor, root: Tensor, newest: bool, mean: bool) -> None:
    """Join entries `source` with `root`, both [B, G, e]; the sources stay where they are."""
    if newest:
        _take_newest(held, source, root, mean)
    if mean:
        fold(held, source, root)


def _take_newest(held: Entries, source: Tensor, root: Tensor, mean: bool) -> None:
    """Give every root its newest member's key and position, and value where it is no mean."""
    slots = torch.arange(held.pos.shape[2], device=root.device)
    order = held.pos[..., 0].long() * len(slots) + slots
    newest = order.scatter_reduce(2, root, order.gather(2, source), "amax")
    member = newest.gather(2, root) % len(slots)
    taken = [held.k, held.k_scale, held.unrotated, held.unrotated_scale, held.pos]
    for x in taken if mean else [*taken, held.v, held.v_scale]:
        if x is not None:
            put(x, root, take(x, member))


def roots(parent: Tensor) -> Tensor:
    """Where entries end up when each passes on to its parent [B, G, n], older or itself."""
    for _ in range(max(1, parent.shape[2]).bit_length()):
        parent = parent.gather(2, parent)
    return parent


def fold(held: Entries, source: Tensor, root: Tensor) -> None:
    """Fold entries `source` into `root`, both [B, G, e]: values and log-weights, in place.

    A root is no source, but for an entry that is listed as its own root and stays as it is. With
    w = exp(log_count) a root gets W = Σ w and V = Σ w v / W over itself and its sources: for equal
    keys attention is left as it was, exactly, since both terms share exp(q·k). A source is left
    empty. Codes are decoded for it, and the means encoded.
    """
    v, scale, log_count = held.v, held.v_scale, held.log_count
    w = log_count.double().exp()
    moved = torch.where(source == root, 0.0, w.gather(2, source))
    gained = torch.zeros_like(w).scatter_add_(2, root, moved)
    total = w + gained

    def rows(index: Tensor) -> Tensor:
        return index.expand(-1, v.shape[1], -1).unsqueeze(-1).expand(-1, -1, -1, v.shape[3])

    def values(index: Tensor) -> Tensor:
        return decode(take(v, index), None if scale is None else take(scale, index), torch.float32)

    # a group's sum stands where one of its sources is listed, whichever: sums take no more room
    # than sources do
    listed = torch.arange(root.shape[2], device=root.device).expand_as(root)
    sum_at = rows(torch.zeros_like(w, dtype=torch.int64).scatter(2, root, listed).gather(2, root))
    # in float64: (Σ w v, Σ w) then does not depend on the order of folding
    sums = torch.zeros(sum_at.shape, dtype=torch.float64, device=v.device)
    sums.scatter_add_(2, sum_at, values(source) * rows(moved))
    before, weight, grown = values(root), rows(w.gather(2, root)), rows(total.gather(2, root))
    joined = (before * weight + sums.gather(2, sum_at)) / grown
    changed = grown > weight
    # a root that gained nothing keeps its bits; roots listed twice are written twice alike
    if scale is None:
        put(v, root, torch.where(changed, joined.to(v.dtype), before))
    else:
        code, step = encode(joined, v.dtype)
        put(v, root, torch.where(changed, code, take(v, root)))
        put(scale, root, torch.where(changed[..., 0], step, take(scale, root)))
    left = torch.where(source == root, total.gather(2, source), 0.0)
    log_count.copy_(total.scatter(2, source, left).log())
