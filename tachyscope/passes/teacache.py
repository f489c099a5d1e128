"""Skip passes whose time embeddings change little: TeaCache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from tachyscope.core.limits import Bound
from tachyscope.core.policy import setting
from tachyscope.core.types import DenoisePass
from tachyscope.passes import SkipPolicy, relative_change


@final
@dataclass(frozen=True)
class TeaCache(SkipPolicy, name="teacache"):
    """Skip passes while the time embedding's relative changes add up to less than `threshold`.

    A skipped pass reuses the last clean estimate: few-step samplers draw new noise in every pass,
    which a stored velocity or residual would not fit.
    """

    threshold: float = setting(
        0.1, "Sum of relative changes below which passes are skipped.", bound=Bound(0.0, 1e6)
    )

    paper: ClassVar[str] = "TeaCache (arXiv 2411.19108)"

    def distance(self, now: DenoisePass, before: DenoisePass, clean: Tensor) -> float:
        # both are in host memory
        times = (x.embed_time(x.timestep) for x in (now, before))
        return float(relative_change(*times))
