"""What to compute again: policies that let the last frame's MLP outputs serve once more."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tachyscope.kernels.decode_attention import GateKind
from tachyscope.types import PassContext, Shape


@dataclass(frozen=True, slots=True)
class Choice:
    """Which tokens of a pass to compute; the others replay.

    rows  [B, R]  int64: a fixed number of tokens a row of the batch, or
    gate  [B, S]  bool: any number, known to the device only
    """

    rows: Tensor | None = None
    gate: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TokenGate:
    """A decision about one token that the device can take: see `kernels.decode_attention.Gate`.

    drawn: a number is drawn for it, one for a guidance pair; else that number is 0.
    """

    kind: GateKind
    value: float
    strict: bool = False
    mixed: bool = False
    tied: bool = False
    age_limit: int = 0
    drawn: bool = False


class ReplayPolicy(abc.ABC):
    """Decides what of the MLPs is computed; its only effect is on the tensors handed in."""

    paper: ClassVar[str]

    @property
    def turns(self) -> bool:
        """Whether a chunk may ask for other work than the last, by its number or by chance."""
        return True

    def token_gate(self, shape: Shape, chunk: int) -> TokenGate | None:
        """Which tokens of a frame are computed, as the device decides it; None: it cannot."""
        return None


class TokenReplay(ReplayPolicy):
    """Decides which tokens' MLPs are computed.

    drift: a replayed output is moved by what computed ones have lately changed by on average.
    """

    drift: bool = False

    @property
    @abc.abstractmethod
    def score(self) -> str:
        """What must be measured: "" nothing, "rotated" TAS, "mixed" the authors' code's TAS, or
        "input": the relative change of the MLP's input, negative."""

    @abc.abstractmethod
    def tensors(self, shape: Shape, device: torch.device) -> dict[str, Tensor]:
        """Fixed tensors to keep beside a layer."""

    @abc.abstractmethod
    def choose(
        self,
        score: Tensor | None,
        age: Tensor,
        own: dict[str, Tensor],
        ctx: PassContext,
        policy_rng: torch.Generator,
    ) -> Choice | None:
        """From scores (where asked for) and ages [B, S] of replayable tokens; None: compute all.

        An age is how often in a row the value that would be replayed has been replayed already.
        """
