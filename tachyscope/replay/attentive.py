"""Replay by the Temporal Attention Score of a token and its position one frame back (FastCar)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

from torch import Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.limits import SHARE, Bound
from tachyscope.core.policy import setting
from tachyscope.core.types import Shape
from tachyscope.kernels.token_gate import Score, TokenGate
from tachyscope.replay import RowSelection, TokenReplay
from tachyscope.replay.share import refresh_and_fill, tie_pairs, tokens_to_compute
from tachyscope.store import LayerPass


@final
@dataclass(frozen=True)
class Attentive(TokenReplay, name="attentive"):
    """Replay tokens of high Temporal Attention Score: over a `threshold`, or a `share` of them.

    share: a fixed number of a pass's tokens, those of lowest score, is computed; in token models a
    token is replayed if its score is among the top `share` of the last N tokens'.
    age: an output is replayed at most that many times in a row (0: no limit).
    cfg: "tied" decides for both rows of a guidance pair by their mean score.
    authors: the score of the published code, unrotated query by rotated key, compared strictly.
    drift: the mean change of computed outputs is added to replayed ones; not in the paper.
    """

    share: float | None = setting(
        None,
        "Share of a pass's tokens, those of highest Temporal Attention Score, whose MLPs are "
        "replayed, from 0 to 1.",
        bound=SHARE,
        instead_of=("threshold",),
    )
    threshold: float | None = setting(
        None,
        "Replay the MLPs of tokens whose Temporal Attention Score is at least this.",
        bound=Bound(-1e12, 1e12),
        instead_of=("share",),
    )
    age: int = setting(
        0,
        "How many times in a row an MLP output may be replayed; 0: no limit.",
        bound=Bound(0, 1_000_000),
    )
    cfg: Literal["tied", "free"] = setting(
        "tied",
        "Whether both rows of a classifier-free guidance pair decide by their mean score (tied), "
        "or each by its own (free).",
    )
    authors: bool = setting(
        False,
        "Score as FastCar's published code does: query before RoPE against key after RoPE, and "
        "above the threshold instead of at least at it.",
    )
    drift: bool = setting(False, "Move replayed outputs by the mean change of the computed ones.")

    paper: ClassVar[str] = "FastCar, arXiv 2505.14709"

    def check_settings(self) -> None:
        if (self.share is None) == (self.threshold is None):
            raise TachyscopeError(
                "replay policy 'attentive' takes a share or a threshold, one of them: "
                "try attentive:share=0.5"
            )
        if self.share is not None:
            tokens_to_compute("attentive", self.share, self.age, 1)

    @property
    def score(self) -> Score:
        return "mixed" if self.authors else "rotated"

    @property
    def work_varies(self) -> bool:
        return self.share is None or self.age > 0

    @property
    def measured_loss(self) -> str:
        # plan fastcar; at a share of 0.75 it is 8.5 to 15.8 and 1.9 (results/tokens-gates.json)
        loss = (
            "loses 8 to 16 dB where a camera moves and 1.7 dB where it rests (16 rooms of "
            "atrium-tokens, 8 frames): passes=draft loses nothing"
        )
        return "" if self.share == 0 else loss

    def token_gate(self, shape: Shape, chunk: int) -> TokenGate:
        tied = self.cfg == "tied" and shape.paired
        if self.share is not None:
            return TokenGate(self.score, "share", self.share, False, tied, self.age)
        assert self.threshold is not None
        return TokenGate(self.score, "threshold", self.threshold, self.authors, tied, self.age)

    def choose(self, p: LayerPass, score: Tensor | None, age: Tensor) -> RowSelection | None:
        assert score is not None
        if self.cfg == "tied" and p.ctx.shape.paired:
            score = tie_pairs(score)
        old = age >= self.age if self.age else None
        if self.threshold is not None:
            passed = score > self.threshold if self.authors else score >= self.threshold
            return RowSelection(gate=~passed if old is None else ~passed | old)
        assert self.share is not None
        return refresh_and_fill(-score, self.share, self.age, p.ctx, "attentive")
