"""What to compute again: policies that let the last frame's MLP outputs serve once more."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tachyscope.core.policy import Policy
from tachyscope.core.types import Shape
from tachyscope.kernels.token_gate import Score, TokenGate
from tachyscope.store import LayerPass


@dataclass(frozen=True, slots=True)
class Choice:
    """Which tokens of a pass to compute; the others replay.

    rows  [B, R]  int64: a fixed number of tokens a row of the batch, or
    gate  [B, S]  bool: any number, known to the device only
    """

    rows: Tensor | None = None
    gate: Tensor | None = None


class ReplayPolicy(Policy, question="replay"):
    """Decides what of the MLPs is computed; its only effect is on the tensors handed in."""

    splits_heads: ClassVar[bool] = True

    @property
    def loses(self) -> str:
        """What it was measured to lose, for a warning; empty where nothing need be said."""
        return ""

    @property
    def turns(self) -> bool:
        """Whether a chunk may ask for other work than the last, by its number or by chance."""
        return True

    @property
    def decides(self) -> bool:
        """Whether it decides token by token."""
        return True

    def token_gate(self, shape: Shape, chunk: int) -> TokenGate | None:
        """How a token model's tokens are chosen one by one; None: none is."""
        return None


class TokenReplay(ReplayPolicy):
    """Decides which tokens' MLPs are computed.

    drift: a replayed output is moved by what computed ones have lately changed by on average.
    """

    drift: bool = False

    @property
    @abc.abstractmethod
    def score(self) -> Score:
        """What must be measured: see `TokenGate`."""

    @abc.abstractmethod
    def token_gate(self, shape: Shape, chunk: int) -> TokenGate: ...

    @abc.abstractmethod
    def choose(self, p: LayerPass, score: Tensor | None, age: Tensor) -> Choice | None:
        """Of a chunk's tokens, from scores (where asked for) and ages [B, S]; None: compute all.

        An age is how often in a row the value that would be replayed has been replayed already.
        """
