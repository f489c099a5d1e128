"""Skip passes whose timesteps are near each other: TeaCache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import ClassVar, Literal, final

from torch import Tensor

from tachyscope.passes import SkipPolicy, relative_change
from tachyscope.settings import check_settings, setting
from tachyscope.types import DenoisePass

# published polynomials, highest power first: from the change of the time embedding to the change
# of the network's output, fitted by TeaCache's authors over 50 steps
RESCALE = {
    "none": (1.0, 0.0),
    "wan-1.3b": (2396.76752, -1311.10545, 201.331979, -8.29855975, 0.137887774),
}


@final
@dataclass(frozen=True)
class TeaCache(SkipPolicy):
    """Skip passes while the time embedding's relative changes add up to less than `threshold`.

    The last clean estimate serves in a skipped pass: samplers of few steps draw new noise for every
    pass, to which a stored velocity or residual would not belong.
    """

    threshold: float = setting(0.1, "Sum of relative changes below which passes are skipped.")
    warmup: int = setting(1, "First passes over a chunk that always run.")
    rescale: Literal["none", "wan-1.3b"] = setting(
        "none", "Polynomial that a change goes through first: none, or the published one of Wan."
    )

    paper: ClassVar[str] = "TeaCache (arXiv 2411.19108)"

    def __post_init__(self) -> None:
        check_settings(self, "passes", "teacache")

    def distance(self, now: DenoisePass, before: DenoisePass, clean: Tensor) -> float:
        # both lie in host memory
        change = float(
            relative_change(now.embed_time(now.timestep), before.embed_time(before.timestep))
        )
        # a polynomial may fall below 0 outside of the range it was fitted in
        return max(0.0, reduce(lambda total, c: total * change + c, RESCALE[self.rescale]))
