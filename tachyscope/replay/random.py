"""Replay tokens drawn at random: what a score must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from tachyscope.replay import Choice, TokenGate, TokenReplay
from tachyscope.replay.share import refresh_and_fill, tokens_to_compute
from tachyscope.settings import check_settings, setting
from tachyscope.types import PassContext, Shape


@final
@dataclass(frozen=True)
class Random(TokenReplay):
    """Replay a random `share` of the tokens; a control. A guidance pair shares its draw."""

    share: float = setting(
        0.5, "Share of a pass's tokens, drawn at random, whose MLPs are replayed, from 0 to 1."
    )
    age: int = setting(
        0, "Times in a row that an MLP output may be replayed before it is computed; 0: no limit."
    )
    drift: bool = setting(False, "Move replayed outputs by the mean change of the computed ones.")

    paper: ClassVar[str] = ""
    score: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_settings(self, "replay", "random")
        tokens_to_compute("random", self.share, self.age, 1)

    def tensors(self, shape: Shape, device: torch.device) -> dict[str, Tensor]:
        return {}

    def token_gate(self, shape: Shape, chunk: int) -> TokenGate | None:
        return TokenGate("draw", self.share, age_limit=self.age, drawn=True)

    def choose(
        self,
        score: Tensor | None,
        age: Tensor,
        own: dict[str, Tensor],
        ctx: PassContext,
        policy_rng: torch.Generator,
    ) -> Choice | None:
        draws = 1 if ctx.shape.paired else age.shape[0]
        luck = torch.rand(
            draws, ctx.tokens, generator=policy_rng, dtype=torch.float32, device=age.device
        )
        luck = luck.expand(age.shape)
        if ctx.shape.token_by_token:
            replay = luck < self.share
            return Choice(gate=~(replay & (age < self.age)) if self.age else ~replay)
        return refresh_and_fill(luck, self.share, self.age, ctx, "random")
