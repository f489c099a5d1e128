"""Replay where a token's query meets the key of its own place one frame back (FastCar)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from tachyscope.errors import TachyscopeError
from tachyscope.replay import Choice, TokenGate, TokenReplay
from tachyscope.replay.share import (
    nearest_share,
    refresh_and_fill,
    share_tensors,
    tokens_to_compute,
)
from tachyscope.settings import check_settings, setting
from tachyscope.types import PassContext, Shape


@final
@dataclass(frozen=True)
class Attentive(TokenReplay):
    """Replay tokens of high Temporal Attention Score, by `threshold` or up to a `share` of them.

    share: of a pass's tokens, the ones of lowest score are computed, a fixed number; a token that
    comes alone is replayed when its score is among the top `share` of the last frame's worth.
    age: a value serves at most that often in a row (0: no limit).
    cfg: "tied" lets both rows of a guidance pair decide by their mean score.
    authors: the published code's score, unrotated query against rotated key, compared strictly.
    drift: what is replayed is moved by the mean change of what is computed; not in the paper.
    """

    share: float | None = setting(
        None,
        "Share of a pass's tokens, those of highest Temporal Attention Score, whose MLPs are "
        "replayed, from 0 to 1.",
        instead_of=("threshold",),
    )
    threshold: float | None = setting(
        None,
        "Replay the MLPs of tokens whose Temporal Attention Score is at least this.",
        instead_of=("share",),
    )
    age: int = setting(
        0, "Times in a row that an MLP output may be replayed before it is computed; 0: no limit."
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

    def __post_init__(self) -> None:
        if (self.share is None) == (self.threshold is None):
            raise TachyscopeError(
                "replay policy 'attentive' takes a share or a threshold, one of them: "
                "try attentive:share=0.5"
            )
        check_settings(self, "replay", "attentive")
        if self.share is not None:
            tokens_to_compute("attentive", self.share, self.age, 1)

    @property
    def score(self) -> str:
        return "mixed" if self.authors else "rotated"

    @property
    def turns(self) -> bool:
        return self.share is None or self.age > 0

    def tensors(self, shape: Shape, device: torch.device) -> dict[str, Tensor]:
        return {} if self.share is None else share_tensors(self.share, shape, device)

    def token_gate(self, shape: Shape, chunk: int) -> TokenGate | None:
        tied = self.cfg == "tied" and shape.paired
        if self.threshold is not None:
            return TokenGate(
                "threshold", self.threshold, self.authors, self.authors, tied, self.age
            )
        assert self.share is not None
        return TokenGate("share", self.share, False, self.authors, tied, self.age)

    def choose(
        self,
        score: Tensor | None,
        age: Tensor,
        own: dict[str, Tensor],
        ctx: PassContext,
        policy_rng: torch.Generator,
    ) -> Choice | None:
        assert score is not None
        if self.cfg == "tied" and ctx.shape.paired:
            pairs = score.unflatten(0, (2, -1))
            score = pairs.mean(0, keepdim=True).expand_as(pairs).flatten(0, 1)
        old = age >= self.age if self.age else None
        if self.threshold is not None:
            passed = score > self.threshold if self.authors else score >= self.threshold
            return Choice(gate=~passed if old is None else ~passed | old)
        assert self.share is not None
        if ctx.shape.token_by_token:
            return Choice(gate=nearest_share(score, self.share, own, ctx, old))
        return refresh_and_fill(-score, self.share, self.age, ctx, "attentive")
