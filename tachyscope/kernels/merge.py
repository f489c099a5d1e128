"""Find alike entries and fold them into one another."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# rows of the similarity matrix made at once, and elements: bound its memory, not its result
TILE, AT_ONCE = 4096, 2**26


def alike_features(x: Tensor, shared: bool) -> Tensor:
    """Vectors whose dot product is the cosine of two entries: x [B, H, n, D] -> [B, G, n, E].

    Shared by all heads (G = 1), it is the mean of the heads' cosines.
    """
    unit = F.normalize(x.float(), dim=-1)
    if not shared:
        return unit
    return unit.transpose(1, 2).flatten(2).unsqueeze(1) / math.sqrt(x.shape[1])


def best_older(features: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """For entries `first`… of features [B, G, n, E], the most alike older one: cosine and index.

    Slots are ordered by age. An entry with none before it gets -inf and itself.
    """
    n = features.shape[2]
    rows = max(1, min(TILE, AT_ONCE // features.shape[:3].numel()))
    cosines, partners = [], []
    for lo in range(first, n, rows):
        hi = min(n, lo + rows)
        cosine = features[:, :, lo:hi] @ features[:, :, :hi].mT
        newer = torch.ones(hi - lo, hi, dtype=torch.bool, device=cosine.device).triu(lo)
        best, index = cosine.masked_fill_(newer, -math.inf).max(-1)
        cosines.append(best)
        partners.append(index)
    partner = torch.cat(partners, 2)
    if first == 0:
        partner[:, :, 0] = 0
    return torch.cat(cosines, 2), partner


def best_older_reference(features: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """The definition, one entry at a time in float64."""
    x = features.double()
    b, g, n, _ = x.shape
    cosine = torch.full((b, g, n - first), -math.inf, dtype=torch.float64)
    partner = torch.zeros(b, g, n - first, dtype=torch.int64)
    for i in range(max(first, 1), n):
        best = (x[:, :, :i] @ x[:, :, i, :, None]).squeeze(-1).max(-1)
        cosine[:, :, i - first], partner[:, :, i - first] = best.values, best.indices
    return cosine.to(features.dtype), partner


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
