"""Replay tokens drawn at random: what a score must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from tachyscope.core.limits import SHARE, Bound
from tachyscope.core.policy import setting
from tachyscope.core.types import Shape
from tachyscope.kernels.token_gate import Score, TokenGate
from tachyscope.replay import RowSelection, TokenReplay
from tachyscope.replay.share import refresh_and_fill, tokens_to_compute
from tachyscope.store import LayerPass


@final
@dataclass(frozen=True)
class RandomReplay(TokenReplay, name="random"):
    """Replay a random `share` of the tokens; a control. A guidance pair shares its draw."""

    share: float = setting(
        0.5,
        "Share of a pass's tokens, drawn at random, whose MLPs are replayed, from 0 to 1.",
        bound=SHARE,
    )
    age: int = setting(
        0,
        "How many times in a row an MLP output may be replayed; 0: no limit.",
        bound=Bound(0, 1_000_000),
    )
    drift: bool = setting(False, "Move replayed outputs by the mean change of the computed ones.")

    score: ClassVar[Score] = "drawn"

    def check_settings(self) -> None:
        tokens_to_compute("random", self.share, self.age, 1)

    def token_gate(self, shape: Shape, chunk: int) -> TokenGate:
        return TokenGate(self.score, "draw", self.share, age_limit=self.age)

    def choose(self, p: LayerPass, score: Tensor | None, age: Tensor) -> RowSelection | None:
        assert score is not None
        return refresh_and_fill(score, self.share, self.age, p.ctx, "random")
