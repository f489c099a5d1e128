"""Replay where the MLP's input is still near the input of the cached output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

from torch import Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.limits import SHARE, Bound
from tachyscope.core.policy import setting
from tachyscope.core.types import Shape
from tachyscope.io.calibration import Calibration
from tachyscope.kernels.token_gate import Score, TokenGate
from tachyscope.replay import RowSelection, TokenReplay
from tachyscope.replay.share import refresh_and_fill, tie_pairs
from tachyscope.store import LayerPass


@final
@dataclass(frozen=True)
class InputReplay(TokenReplay, name="input"):
    """Replay tokens whose MLP input has changed little since the output was computed.

    The change is |x - x_old| / |x_old|, where x_old is the input of the cached output, however old:
    unlike an attention score it bounds the error (docs/methods.md), and errors do not add up over
    frames.

    budget: the mean square of replayed tokens' changes, over all tokens of a layer; with a
    calibration divided by what such a change costs in that layer. Each token adds the budget to a
    credit of at most a frame's tokens, and a replayed token takes its own square from it.
    loss: the budget that a calibration maps to a loss of so many dB.
    """

    threshold: float | None = setting(
        None,
        "Replay the MLPs of tokens whose input has changed by at most this relative amount.",
        bound=Bound(0.0, 1e6),
        instead_of=("share", "budget", "loss"),
    )
    share: float | None = setting(
        None,
        "Share of a pass's tokens, those whose inputs changed least, that are replayed.",
        bound=SHARE,
        instead_of=("threshold", "budget", "loss"),
    )
    budget: float | None = setting(
        None,
        "Mean square of replayed tokens' relative changes, over all tokens, weighed by layer "
        "where the model has a calibration; token models.",
        bound=Bound(0.0, 1e6),
        instead_of=("threshold", "share", "loss"),
    )
    loss: float | None = setting(
        None,
        "Loss in dB that is allowed, by the model's calibration; token models.",
        bound=Bound(0.0, 100.0),
        instead_of=("threshold", "share", "budget"),
    )
    file: str | None = setting(
        None,
        "A calibration by tachyscope inspect --fit-neurons; by default the one beside the model's "
        "weights.",
    )

    paper: ClassVar[str] = "this project"
    score: ClassVar[Score] = "input"

    def check_settings(self) -> None:
        if sum(x is not None for x in (self.threshold, self.share, self.budget, self.loss)) != 1:
            raise TachyscopeError(
                "replay policy 'input' takes a threshold, a share, a budget or a loss, one of "
                "them: try input:share=0.5"
            )

    @property
    def work_varies(self) -> bool:
        return self.share is None

    def calibrated(self, calibration: Calibration | None) -> InputReplay:
        """This policy with its loss replaced by the calibrated budget."""
        if self.loss is None:
            return self
        if calibration is None:
            raise TachyscopeError(
                "replay=input:loss needs a calibration of the model, and it has none: give budget "
                "or share instead"
            )
        return replace(self, loss=None, budget=calibration.budget(self.loss))

    def by_layer(self, calibration: Calibration | None) -> list[InputReplay]:
        """This policy for each layer, its budget divided by the cost of changes there."""
        if calibration is None or self.budget is None:
            return []
        return [replace(self, budget=self.budget / float(cost)) for cost in calibration.cost]

    def check_plan(self, plan: Mapping[str, Any], shape: Shape) -> None:
        if not shape.token_by_token and self.threshold is None and self.share is None:
            raise TachyscopeError(
                "replay=input takes a budget or a loss with token models alone, this one makes "
                "whole chunks: give threshold or share"
            )

    def token_gate(self, shape: Shape, chunk: int) -> TokenGate:
        if self.threshold is not None:  # the score is the negative change
            return TokenGate(self.score, "threshold", -self.threshold, tied=shape.paired)
        if self.share is not None:
            return TokenGate(self.score, "share", self.share, tied=shape.paired)
        # a loss is without a budget before `calibrated`
        return TokenGate(self.score, "budget", self.budget or 0.0, tied=shape.paired)

    def choose(self, p: LayerPass, score: Tensor | None, age: Tensor) -> RowSelection | None:
        assert score is not None
        if p.ctx.shape.paired:
            score = tie_pairs(score)
        if self.threshold is not None:
            return RowSelection(gate=-score > self.threshold)
        assert self.share is not None
        return refresh_and_fill(-score, self.share, 0, p.ctx, "input")
