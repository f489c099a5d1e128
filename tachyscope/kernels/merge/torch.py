"""Fold entries into one another, by stock torch."""

from __future__ import annotations

import torch
from torch import Tensor


def roots(parent: Tensor) -> Tensor:
    """Where entries end up when each passes on to its parent [B, G, n], older or itself."""
    for _ in range(max(1, parent.shape[2]).bit_length()):
        parent = parent.gather(2, parent)
    return parent


def fold(v: Tensor, log_count: Tensor, source: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """Values and log-weights after entries `source` are folded into `root`, both [B, G, e].

    v [B, H, n, D], log_count [B, G, n], G = H or 1; a root is no source, but for an entry that is
    listed as its own root and stays as it is. With w = exp(log_count) a root gets W = Σ w and
    V = Σ w v / W over itself and its sources: for equal keys attention is left as it was, exactly,
    since both terms share exp(q·k). A source is left empty.
    """
    w = log_count.double().exp()
    moved = torch.where(source == root, 0.0, w.gather(2, source))
    gained = torch.zeros_like(w).scatter_add_(2, root, moved)
    total = w + gained

    def rows(index: Tensor) -> Tensor:
        return index.expand(-1, v.shape[1], -1).unsqueeze(-1).expand(-1, -1, -1, v.shape[3])

    # a group's sum stands where one of its sources is listed, whichever: sums take no more room
    # than sources do
    listed = torch.arange(root.shape[2], device=root.device).expand_as(root)
    sum_at = rows(torch.zeros_like(w, dtype=torch.int64).scatter(2, root, listed).gather(2, root))
    # in float64: (Σ w v, Σ w) then does not depend on the order of folding
    own = rows(root)
    sums = torch.zeros(sum_at.shape, dtype=torch.float64, device=v.device)
    sums.scatter_add_(2, sum_at, v.gather(2, rows(source)) * rows(moved))
    before, weight, grown = v.gather(2, own), rows(w.gather(2, root)), rows(total.gather(2, root))
    joined = (before * weight + sums.gather(2, sum_at)) / grown
    # a root that gained nothing keeps its bits; roots listed twice are written twice alike
    joined = torch.where(grown > weight, joined.to(v.dtype), before)
    left = torch.where(source == root, total.gather(2, source), 0.0)
    return v.scatter(2, own, joined), total.scatter(2, source, left).log().to(log_count.dtype)
