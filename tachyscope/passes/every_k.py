"""Run every k-th pass, skip the others: what a distance must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from tachyscope.passes import SkipPolicy
from tachyscope.settings import check_settings, setting


@final
@dataclass(frozen=True)
class EveryK(SkipPolicy):
    """Run every `k`-th denoising pass over a chunk, and the last; a control."""

    k: int = setting(2, "Run the first pass and each k-th after it; 1 runs all.")

    paper: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_settings(self, "passes", "every_k")

    @property
    def threshold(self) -> float:
        return float(self.k)
