"""Replay where the MLP's input is still near the one that made the kept output."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from tachyscope.calibration import Calibration
from tachyscope.errors import TachyscopeError
from tachyscope.replay import Choice, TokenReplay
from tachyscope.replay.share import nearest_share, refresh_and_fill, share_tensors
from tachyscope.settings import check_settings, setting
from tachyscope.types import PassContext, Shape

DEAREST = 4.0  # times the budget that one token may take of it


@final
@dataclass(frozen=True)
class Input(TokenReplay):
    """Replay tokens whose MLP input has changed little since the output was computed.

    The change is |x - x_old| / |x_old|, and x_old is the input that made the kept output, however
    old: unlike a score of attention it bounds the error (docs/theory.md), and errors do not add up
    over frames.

    budget: the mean square of replayed tokens' changes, over all tokens of a layer, times what a
    calibration knows such a change to cost in this layer. Every token adds it to a credit of at
    most a frame's worth, a replayed token takes its own from that.
    loss: a budget that is calibrated to lose so many dB.
    """

    threshold: float | None = setting(
        None, "Replay the MLPs of tokens whose input has changed by at most this part of itself.",
        instead_of=("share", "budget", "loss"),
    )  # fmt: skip
    share: float | None = setting(
        None, "Share of a pass's tokens, those whose inputs changed least, that are replayed.",
        instead_of=("threshold", "budget", "loss"),
    )  # fmt: skip
    budget: float | None = setting(
        None, "Mean square of replayed tokens' relative changes, over all tokens, weighed by layer "
        "where the model has a calibration; token models.",
        instead_of=("threshold", "share", "loss"),
    )  # fmt: skip
    loss: float | None = setting(
        None, "dB that may be lost, by the model's calibration; token models.",
        instead_of=("threshold", "share", "budget"),
    )  # fmt: skip
    file: str | None = setting(
        None, "A file of tachyscope calibrate; the one beside the model's weights if none is named."
    )

    paper: ClassVar[str] = "this project"
    score: ClassVar[str] = "input"

    def __post_init__(self) -> None:
        if sum(x is not None for x in (self.threshold, self.share, self.budget, self.loss)) != 1:
            raise TachyscopeError(
                "replay policy 'input' takes a threshold, a share, a budget or a loss, one of "
                "them: try input:share=0.5"
            )
        check_settings(self, "replay", "input")

    @property
    def turns(self) -> bool:
        return self.share is None

    def calibrated(self, calibration: Calibration | None) -> Input:
        """The same with a budget in place of a loss."""
        if self.loss is None:
            return self
        if calibration is None:
            raise TachyscopeError(
                "replay=input:loss needs a calibration of the model, and it has none: give budget "
                "or share instead"
            )
        return replace(self, loss=None, budget=calibration.budget(self.loss))

    def by_layer(self, calibration: Calibration | None) -> list[Input]:
        """The same for every layer, each with the budget that its changes' cost leaves it."""
        if calibration is None or self.budget is None:
            return []
        return [replace(self, budget=self.budget / float(cost)) for cost in calibration.cost]

    def tensors(self, shape: Shape, device: torch.device) -> dict[str, Tensor]:
        if self.budget is not None or self.loss is not None:
            if not shape.token_by_token:
                raise TachyscopeError(
                    "replay=input takes a budget or a loss with token models alone, this one makes "
                    "whole chunks: give threshold or share"
                )
            fine: dict[str, Any] = {"dtype": torch.float32, "device": device}
            return {"credit": torch.zeros(shape.batch, 1, **fine)}
        return {} if self.share is None else share_tensors(self.share, shape, device)

    def choose(
        self,
        score: Tensor | None,
        age: Tensor,
        own: dict[str, Tensor],
        ctx: PassContext,
        policy_rng: torch.Generator,
    ) -> Choice | None:
        assert score is not None
        if ctx.shape.paired:
            pairs = score.unflatten(0, (2, -1))
            score = pairs.mean(0, keepdim=True).expand_as(pairs).flatten(0, 1)
        if self.threshold is not None:
            return Choice(gate=-score > self.threshold)
        if self.budget is not None:
            return Choice(gate=self._too_dear(score.square(), own["credit"], ctx))
        assert self.share is not None
        if ctx.shape.token_by_token:
            return Choice(gate=nearest_share(score, self.share, own, ctx))
        return refresh_and_fill(-score, self.share, 0, ctx, "input")

    def _too_dear(self, price: Tensor, credit: Tensor, ctx: PassContext) -> Tensor:
        """Whether a token's price [B, 1] is more than the credit, or than any token may take."""
        assert self.budget is not None
        credit.add_(self.budget).clamp_(max=self.budget * ctx.shape.tokens_per_frame)
        compute = (price > credit) | (price > DEAREST * self.budget)
        credit.sub_(price.masked_fill(compute, 0.0))
        return compute
