"""Compute the MLPs of every k-th chunk and replay the others: a control for scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from tachyscope.core.limits import Bound
from tachyscope.core.policy import setting
from tachyscope.core.types import Shape
from tachyscope.kernels.token_gate import Score, TokenGate
from tachyscope.replay import RowSelection, TokenReplay
from tachyscope.store import LayerPass


@final
@dataclass(frozen=True)
class EveryKReplay(TokenReplay, name="every_k"):
    """Compute all tokens of every `k`-th chunk, and replay all of the others; a control."""

    k: int = setting(
        2,
        "Compute the MLPs of every k-th chunk, and replay them in the others.",
        bound=Bound(1, 100_000_000),
    )
    drift: bool = setting(False, "Move replayed outputs by the mean change of the computed ones.")

    score: ClassVar[Score] = ""

    def token_gate(self, shape: Shape, chunk: int) -> TokenGate:
        return TokenGate("", "draw", 0.0 if chunk % self.k == 0 else 1.0)

    def choose(self, p: LayerPass, score: Tensor | None, age: Tensor) -> RowSelection | None:
        if p.ctx.chunk % self.k == 0:
            return None
        return RowSelection(rows=torch.empty(age.shape[0], 0, dtype=torch.int64, device=age.device))
