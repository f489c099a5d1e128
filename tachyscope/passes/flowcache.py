"""Skip passes whose latents change little: FlowCache's rule for a chunk."""

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
class FlowCache(SkipPolicy, name="flowcache"):
    """Skip passes while the patch embedding's relative changes add up to less than `threshold`.

    The paper's samplers follow an ODE. Few-step samplers draw new noise in every pass, so the
    latents of the last pass are compared with where the ODE's step would bring them; and a skipped
    pass reuses the last clean estimate, which an ODE step at the same velocity keeps too. The host
    reads one number a pass, so no CUDA graph is recorded; the videos of a batch share it.
    """

    threshold: float = setting(
        0.1, "Sum of relative changes below which passes are skipped.", bound=Bound(0.0, 1e6)
    )

    paper: ClassVar[str] = "FlowCache (arXiv 2602.10825)"
    graph_capturable: ClassVar[bool] = False

    def distance(self, now: DenoisePass, before: DenoisePass, clean: Tensor) -> float:
        # x = (1 - s) x0 + s n: along the ODE x moves by ds (n - x0), which is ds (x - x0) / s
        step = (now.noise - before.noise) / before.noise
        ahead = before.x + step * (before.x - clean)
        embed = before.embed_patches
        return relative_change(embed(ahead).float(), embed(before.x).float()).item()
