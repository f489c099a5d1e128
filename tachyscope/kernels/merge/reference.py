"""The definitions of folding and merging, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from tachyscope.kernels.entries import take
from tachyscope.kernels.merge.torch import Entries


def fold_reference(
    v: Tensor, log_count: Tensor, source: Tensor, root: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition, one entry after the other in float64."""
    out, weights = v.double().clone(), log_count.double().exp()
    for b in range(v.shape[0]):
        for h in range(v.shape[1]):
            g = h if root.shape[1] > 1 else 0
            w = log_count[b, g].double().exp()
            for s, r in zip(source[b, g].tolist(), root[b, g].tolist(), strict=True):
                if s != r:
                    joint = w[s] + w[r]
                    out[b, h, r] = (w[s] * v[b, h, s].double() + w[r] * out[b, h, r]) / joint
                    w[r], w[s] = joint, 0.0
            weights[b, g] = w
    return out.to(v.dtype), weights.log().to(log_count.dtype)


def merge_entries_reference(
    held: Entries, alike: Tensor, partner: Tensor, excess: int, newest: bool, mean: bool
) -> tuple[list[Tensor], Tensor]:
    """The tensors of the entries that stay, and their partners: entry by entry, of each head."""
    n, slots = alike.shape[2], held.k.shape[2]
    tensors = [x.clone() for x in held.tensors()]
    order = torch.zeros(*alike.shape[:2], slots - excess, dtype=torch.int64, device=alike.device)
    heir = order[:, :, : n - excess].clone()
    for b in range(alike.shape[0]):
        for g in range(alike.shape[1]):
            # of equals the oldest first
            source = alike[b, g].argsort(descending=True, stable=True)[:excess].tolist()
            older, times = partner[b, g].tolist(), held.pos[b, g, :, 0].tolist()
            stay = [i for i in range(n) if i not in source]
            end = [_end(i, older, source) for i in range(n)]
            order[b, g] = torch.tensor([*stay, *range(n, slots)])
            heir[b, g] = torch.tensor([stay.index(end[older[i]]) for i in stay])
            for root in stay:
                group = [root, *(i for i in source if end[i] == root)]
                last = max((times[i], i) for i in group)[1]
                _join_group(held, tensors, b, g, group, last, newest, mean)
    kept = [take(x, order) for x in tensors]
    return kept, heir


def _end(i: int, older: list[int], gone: list[int]) -> int:
    """Follow partners to one that stays."""
    while i in gone:
        i = older[i]
    return i


def _join_group(
    held: Entries, tensors: list[Tensor], b: int, g: int, group: list[int], last: int,
    newest: bool, mean: bool,
) -> None:  # fmt: skip
    """Write a group's one entry where its first member stands."""
    k, v, log_count, pos, *unrotated = tensors
    root, w = group[0], held.log_count[b, g, group].double().exp()
    heads = slice(None) if held.log_count.shape[1] == 1 else slice(g, g + 1)
    if newest:
        taken = [(k, held.k), (pos, held.pos)] + ([] if mean else [(v, held.v)])
        if held.unrotated is not None:
            taken.append((unrotated[0], held.unrotated))
        for x, old in taken:
            own = slice(g, g + 1) if x is pos else heads
            x[b, own, root] = old[b, own, last]
    if mean:
        joint = held.v[b, heads, group].double() * w[:, None]
        v[b, heads, root] = (joint.sum(1) / w.sum()).to(v.dtype)
        log_count[b, g, root] = w.sum().log()
