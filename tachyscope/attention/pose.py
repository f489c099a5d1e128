"""Read the latent frames whose camera poses are nearest to the current one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast, final

from torch import Tensor

from tachyscope.attention import WEIGHTS
from tachyscope.attention.frames import FrameAttention
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.limits import LATENTS, TINY, Bound
from tachyscope.core.policy import setting
from tachyscope.core.types import Shape
from tachyscope.store import LayerPass
from tachyscope.store.frame_bank import FrameBank
from tachyscope.store.pose_bank import PoseBank


@final
@dataclass(frozen=True)
class Pose(FrameAttention, name="pose"):
    """Read the past latent frames whose camera poses are nearest to the chunk's mean pose.

    They are retrieved before the chunk's first pass; of equally near ones the older, so that given
    frames are preferred to generated ones. All that is resident is read: `resident` of cache=bank
    says how much. A retrieved frame's weight is past_weight at the same pose, and its logarithm
    falls with distance as a Gaussian, to a weight of 1. Needs a model with camera poses.
    """

    past_weight: float = setting(
        8.0,
        "Weight of a latent frame at the same pose, which falls to 1 with distance: over 1 changes "
        "what the model would do, 1 is its own attention.",
        bound=WEIGHTS,
    )
    angle: float = setting(
        5.0,
        "Degrees between two poses at which the added score is 0.61 of that at the same pose.",
        bound=Bound(TINY, 180.0),
    )
    distance: float = setting(
        0.04,
        "Distance between two cameras with the same effect, in the model's own units.",
        bound=Bound(TINY, 1e9),
    )
    sink: int = setting(1, "First latent frames that are always read.", bound=LATENTS)
    newest: int = setting(
        1, "Latest latent frames that are always read, with weight 1.", bound=LATENTS
    )

    wants_poses: ClassVar[bool] = True
    splits_heads: ClassVar[bool] = True
    bank: ClassVar[type[FrameBank]] = PoseBank

    @property
    def spread(self) -> tuple[float, ...]:
        return math.radians(self.angle), self.distance

    def check_plan(self, plan: Mapping[str, Any], shape: Shape) -> None:
        super().check_plan(plan, shape)
        if not shape.poses or shape.rolling_frames:
            raise TachyscopeError(
                "attention=pose is for models that are given their camera's poses, and this one is "
                "not: use attention=ann:read=0.4"
            )

    def before_chunk(self, p: LayerPass, poses: Tensor) -> None:
        bank = cast(PoseBank, p.layer.bank)
        bank.bring(p.layer, poses, p.ctx.total)
        p.work.macs += p.ctx.shape.batch * bank.layout.capacity * poses[0, 0].numel()
