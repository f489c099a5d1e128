"""Read the past latent frames most similar to the newest one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast, final

from torch import Tensor

from tachyscope.attention import NEWEST, WEIGHTS
from tachyscope.attention.frames import FrameAttention
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.limits import LATENTS
from tachyscope.core.policy import setting
from tachyscope.core.types import Shape
from tachyscope.store import LayerPass
from tachyscope.store.frame_bank import FrameBank
from tachyscope.store.similar_bank import SimilarBank

SPREAD = 0.2  # standard deviation of a difference of cosines, by which a full bank compares frames


@final
@dataclass(frozen=True)
class Similar(FrameAttention, name="similar"):
    """Read the past latent frames whose values are most similar to the newest one's.

    In a chunk's first pass each layer compares mean values in sixteen parts of the picture, less
    the mean of all frames. A frame is as near as the nearest of it and the frames before and after
    it; of equally near ones the older is read. All that is resident is read: `resident` of
    cache=bank says how much. Retrieved frames have weight past_weight.
    """

    past_weight: float = setting(
        4.0,
        "Weight of retrieved latent frames: over 1 changes what the model would do, 1 is its own "
        "attention.",
        bound=WEIGHTS,
    )
    sink: int = setting(1, "First latent frames that are always read.", bound=LATENTS)
    newest: int = setting(
        NEWEST, "Latest latent frames that are always read, with weight 1.", bound=LATENTS
    )

    bank: ClassVar[type[FrameBank]] = SimilarBank
    spread: ClassVar[tuple[float, ...]] = (SPREAD,)
    splits_heads: ClassVar[bool] = True

    def check_settings(self) -> None:
        if not self.newest:
            raise TachyscopeError(
                "attention policy 'similar': newest=0f leaves no frame to compare with: raise it"
            )

    def check_plan(self, plan: Mapping[str, Any], shape: Shape) -> None:
        super().check_plan(plan, shape)
        if shape.rolling_frames:
            raise TachyscopeError(
                "attention=similar cannot serve a model whose chunks overlap: use "
                "attention=ann:read=0.4"
            )

    def attend(self, p: LayerPass, q: Tensor) -> Tensor:
        ctx, bank = p.ctx, cast(SimilarBank, p.layer.bank)
        if not ctx.before and ctx.past:
            bank.bring(p.layer, ctx.total)
            macs = ctx.shape.batch * bank.layout.capacity * bank.tensors["key"].shape[2]
            p.work.macs += macs // ctx.shape.ranks  # all of them do the same
        return super().attend(p, q)
