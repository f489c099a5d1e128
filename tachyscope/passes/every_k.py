"""Run every k-th pass and skip the others: a control for distances."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from tachyscope.core.limits import Bound
from tachyscope.core.policy import setting
from tachyscope.passes import SkipPolicy


@final
@dataclass(frozen=True)
class EveryKPass(SkipPolicy, name="every_k"):
    """Run every `k`-th denoising pass over a chunk, and the last; a control."""

    k: int = setting(
        2, "Run the first pass and each k-th after it; 1 runs all.", bound=Bound(1, 100_000_000)
    )

    @property
    def threshold(self) -> float:
        return float(self.k)
