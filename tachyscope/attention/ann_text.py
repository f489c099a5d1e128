"""Read only the prompt tokens that some query may attend to (AnnCA)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, final

from torch import Tensor

from tachyscope.attention import TextPolicy
from tachyscope.attention.pads import collapse
from tachyscope.core.limits import Bound
from tachyscope.core.policy import setting
from tachyscope.core.types import Text
from tachyscope.core.work import Work
from tachyscope.kernels.attention import attention
from tachyscope.kernels.device import host_may_read
from tachyscope.kernels.hashing import buckets, planes
from tachyscope.kernels.prompt_hits import count_nearest


@final
@dataclass(frozen=True)
class AnnText(TextPolicy, name="ann"):
    """Drop prompt tokens that share a hash bucket with no query of the current pass.

    With "lsh" a bucket is a sign pattern of `bits` random projections, those of attention=ann; with
    "int8" a query's bucket is its nearest token by int8 codes. The `keep` tokens with most queries
    are read; a head without any reads all. Padding is collapsed first, which is exact.
    """

    keep: int = setting(170, "Most prompt tokens that a head reads.", bound=Bound(1, 100_000))
    hash: Literal["int8", "lsh"] = setting(
        "int8",
        "How queries pick tokens: each its nearest by keys in 8 bits (int8), or all with the same "
        "signs of random projections (lsh).",
    )
    bits: int = setting(
        6, "Random projections of hash=lsh; int8 does not use it.", bound=Bound(1, 32)
    )

    paper: ClassVar[str] = "FAST-AR's AnnCA, arXiv 2602.01801"
    splits_heads: ClassVar[bool] = True

    def prepare(self, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Text:
        planes(self.bits, k.shape[-1], k.device)  # cached before the first chunk
        return collapse(k, v, lengths)

    def attend(self, q: Tensor, text: Text, work: Work) -> Tensor:
        assert text.log_count is not None
        log_count = text.log_count.expand(-1, q.shape[1], -1)
        hits = self._hits(q, text.k, log_count)  # [B, H, L]
        log_count = log_count.masked_fill(hits == 0, -math.inf)
        size = min(self.keep, hits.shape[2])
        if host_may_read(q):
            # tokens that every head drops are not scored
            size = min(size, int((log_count > -math.inf).sum(-1).max()))
        work.add_text_reads(q, size)
        if size == hits.shape[2]:
            return attention(q, text.k, text.v, log_count)
        best = hits.topk(size, -1, sorted=False).indices
        wide = best.unsqueeze(-1).expand(-1, -1, -1, text.k.shape[3])
        return attention(
            q, text.k.gather(2, wide), text.v.gather(2, wide), log_count.gather(2, best)
        )

    def _hits(self, q: Tensor, k: Tensor, log_count: Tensor) -> Tensor:
        """The number of queries in each token's bucket; 0 for an empty slot."""
        if self.hash == "int8":
            return count_nearest(q, k, log_count)
        hit = buckets(q, self.bits).unsqueeze(-1) == buckets(k, self.bits).unsqueeze(-2)
        hits = hit.sum(2)
        # a head without a hit reads all
        hits += hits.sum(-1, keepdim=True) == 0
        return hits.masked_fill(log_count == -math.inf, 0)
