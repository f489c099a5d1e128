"""Find every new entry's most alike older one, by stock torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tachyscope.kernels.codes import numbers

# rows of the similarity matrix made at once, and elements: bound its memory, not its result
TILE, AT_ONCE = 4096, 2**26


def alike_features(x: Tensor, shared: bool) -> Tensor:
    """Vectors whose dot product is the cosine of two entries: x [B, H, n, D] -> [B, G, n, E].

    Shared by all heads (G = 1), it is the mean of the heads' cosines.
    """
    unit = F.normalize(numbers(x).float(), dim=-1)
    if not shared:
        return unit
    return unit.transpose(1, 2).flatten(2).unsqueeze(1) / math.sqrt(x.shape[1])


def features(vectors: Sequence[Tensor], shared: bool) -> Tensor:
    """Vectors [B, G, n, E] whose dot product is the mean cosine of two entries' `vectors`."""
    parts = [alike_features(x, shared) for x in vectors]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1).div_(math.sqrt(len(parts)))


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


def measure(features: Tensor, partner: Tensor, alike: Tensor) -> None:
    theirs = features.gather(2, partner.unsqueeze(-1).expand_as(features))
    alike.copy_((features * theirs).sum(-1))
    alike[:, :, 0] = -math.inf
