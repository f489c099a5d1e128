"""Compute every k-th frame, replay the others: what a score must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from tachyscope.replay import Choice, TokenGate, TokenReplay
from tachyscope.settings import check_settings, setting
from tachyscope.types import PassContext, Shape


@final
@dataclass(frozen=True)
class EveryK(TokenReplay):
    """Compute all tokens of every `k`-th chunk and none of the others; a control."""

    k: int = setting(2, "Compute the MLPs of every k-th chunk, and replay them in the others.")
    drift: bool = setting(False, "Move replayed outputs by the mean change of the computed ones.")

    paper: ClassVar[str] = ""
    score: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_settings(self, "replay", "every_k")

    def tensors(self, shape: Shape, device: torch.device) -> dict[str, Tensor]:
        return {}

    def token_gate(self, shape: Shape, chunk: int) -> TokenGate | None:
        return TokenGate("draw", 0.0 if chunk % self.k == 0 else 1.0)

    def choose(
        self,
        score: Tensor | None,
        age: Tensor,
        own: dict[str, Tensor],
        ctx: PassContext,
        policy_rng: torch.Generator,
    ) -> Choice | None:
        if ctx.chunk % self.k == 0:
            return None
        return Choice(rows=torch.empty(age.shape[0], 0, dtype=torch.int64, device=age.device))
