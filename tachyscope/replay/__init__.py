"""What is recomputed: policies that reuse (replay) MLP outputs of the last frame."""

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
class RowSelection:
    """The tokens of a pass whose MLPs are computed; the others are replayed.

    rows  [B, R]  int64: a fixed number of tokens of each row of the batch, or
    gate  [B, S]  bool: any number, known to the device only
    """

    rows: Tensor | None = None
    gate: Tensor | None = None


class ReplayPolicy(Policy, question="replay"):
    """Decides which MLP outputs are computed and which are replayed."""

    splits_heads: ClassVar[bool] = True

    @property
    def measured_loss(self) -> str:
        """The measured loss of quality, for a warning; empty if there is none to warn of."""
        return ""

    @property
    def work_varies(self) -> bool:
        """Whether the work of a chunk may differ from that of the last one."""
        return True

    @property
    def per_token(self) -> bool:
        """Whether it decides for each token."""
        return True

    def token_gate(self, shape: Shape, chunk: int) -> TokenGate | None:
        """The gate that decides for each token of a token model; None if there is none."""
        return None


class TokenReplay(ReplayPolicy):
    """Decides which tokens' MLPs are computed.

    drift: the recent mean change of computed outputs is added to replayed ones.
    """

    drift: bool = False

    @property
    @abc.abstractmethod
    def score(self) -> Score:
        """The score that it decides by: see `TokenGate`."""

    @abc.abstractmethod
    def token_gate(self, shape: Shape, chunk: int) -> TokenGate: ...

    @abc.abstractmethod
    def choose(self, p: LayerPass, score: Tensor | None, age: Tensor) -> RowSelection | None:
        """Choose among a chunk's tokens by scores and ages [B, S]; None computes all.

        An age is how many times in a row a token's output has been replayed.
        """
