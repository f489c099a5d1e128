"""Replay where a token's query meets the key of its own place one frame back (FastCar)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from tachyscope.errors import TachyscopeError
from tachyscope.replay import Choice, ReplayPolicy
from tachyscope.replay.share import refresh_and_fill, tokens_to_compute
from tachyscope.types import Moment, Shape


@final
@dataclass(frozen=True)
class Attentive(ReplayPolicy):
    """Replay tokens of high Temporal Attention Score, by `threshold` or up to a `share` of them.

    share: of a pass's tokens, the ones of lowest score are computed, a fixed number; a token that
    comes alone is replayed when its score is among the top `share` of the last frame's worth.
    age: a value serves at most that often in a row (0: no limit).
    cfg: "tied" lets both rows of a guidance pair decide by their mean score.
    authors: the published code's score, unrotated query against rotated key, compared strictly.
    drift: what is replayed is moved by the mean change of what is computed; not in the paper.
    """

    share: float | None = None
    threshold: float | None = None
    age: int = 0
    cfg: Literal["tied", "free"] = "tied"
    authors: bool = False
    drift: bool = False

    paper: ClassVar[str] = "FastCar, arXiv 2505.14709"

    def __post_init__(self) -> None:
        if (self.share is None) == (self.threshold is None):
            raise TachyscopeError(
                "replay policy 'attentive' takes a share or a threshold, one of them: "
                "try attentive:share=0.5"
            )
        if self.share is not None:
            tokens_to_compute("attentive", self.share, self.age, 1)
        if self.age < 0:
            raise TachyscopeError(
                f"replay policy 'attentive': age must be 0 or more, got {self.age}"
            )

    @property
    def score(self) -> str:
        return "mixed" if self.authors else "rotated"

    def tensors(self, shape: Shape, device: torch.device) -> dict[str, Tensor]:
        if self.share is None or not shape.causal:
            return {}
        # not a number: no token has scored there yet
        return {"recent_scores": torch.full((shape.rows, shape.places), math.nan, device=device)}

    def choose(
        self,
        score: Tensor | None,
        age: Tensor,
        own: dict[str, Tensor],
        at: Moment,
        dice: torch.Generator,
    ) -> Choice | None:
        assert score is not None
        if self.cfg == "tied" and at.shape.paired:
            pairs = score.unflatten(0, (2, -1))
            score = pairs.mean(0, keepdim=True).expand_as(pairs).flatten(0, 1)
        if self.threshold is not None:
            passed = score > self.threshold if self.authors else score >= self.threshold
            return Choice(gate=~self._young(passed, age))
        assert self.share is not None
        if at.shape.causal:
            return Choice(gate=~self._young(self._among_top(score, own, at), age))
        return refresh_and_fill(-score, self.share, self.age, at, "attentive")

    def _young(self, replay: Tensor, age: Tensor) -> Tensor:
        return replay & (age < self.age) if self.age else replay

    def _among_top(self, score: Tensor, own: dict[str, Tensor], at: Moment) -> Tensor:
        """Whether its middle rank lies in the top `share` of the last frame's worth of scores."""
        assert self.share is not None
        ring = own["recent_scores"]
        known = (~ring.isnan()).sum(-1, keepdim=True)
        higher = (ring > score).sum(-1, keepdim=True)
        ring[:, at.start : at.start + 1] = score
        return higher + 0.5 < self.share * (known + 1)
