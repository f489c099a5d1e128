"""What `pose` and `similar` share: attention over the latent frames that a bank retrieves."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar, cast

from torch import Tensor

from tachyscope.attention import AttentionPolicy, attend
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.types import Shape
from tachyscope.store import LayerPass
from tachyscope.store.frame_bank import FrameBank, FrameLayout


class FrameAttention(AttentionPolicy):
    """Reads the first latent frames, the newest and the retrieved ones: all that is resident."""

    reads_frames: ClassVar[bool] = True
    bank: ClassVar[type[FrameBank]]  # how frames are retrieved
    sink: int
    newest: int

    @property
    @abc.abstractmethod
    def spread(self) -> tuple[float, ...]:
        """The standard deviations that distances of keys are divided by."""

    @property
    def bank_fault(self) -> str | None:
        return None

    def check_plan(self, plan: Mapping[str, Any], shape: Shape) -> None:
        super().check_plan(plan, shape)
        if plan["cache"].name != "bank":
            raise TachyscopeError(
                f"attention={self.name} reads a bank, got cache={plan['cache']}: use "
                f"cache=bank:resident=13f"
            )

    def bank_layout(self, shape: Shape, slots: int, budget: int, coded: bool) -> FrameLayout:
        """How a bank divides a layer of `slots` cache slots; raises where they are too few."""
        tokens = shape.tokens_per_frame
        resident = (slots - shape.max_pass_tokens) // tokens - self.sink - self.newest
        if resident < 1:
            least = self.sink + self.newest + shape.chunk + 1
            raise TachyscopeError(
                f"cache policy 'bank': {slots} resident entries have no room for a latent frame "
                f"beside sink={self.sink}f, newest={self.newest}f and the present {shape.chunk}f: "
                f"raise resident to {least}f or more"
            )
        return FrameLayout(
            self.sink, resident, self.newest, group=1, kept=tokens,
            capacity=max(budget // tokens, resident), grid=shape.grid, bank=self.bank,
            log_weight=self.log_weight, spread=self.spread,
        )  # fmt: skip

    def log_weights(self, p: LayerPass) -> Tensor:
        weights = cast(FrameBank, p.layer.bank).log_weights(p.ctx.end)
        return weights if self.weighs(p.ctx) else weights * 0

    def attend(self, p: LayerPass, q: Tensor) -> Tensor:
        ctx = p.ctx
        p.work.add_reads(q, ctx.end)
        weights = self.log_weights(p) if self.weighs(ctx) else None
        return attend(ctx.shape, q, *p.layer.read(ctx, slice(0, ctx.end), log_count=weights))
