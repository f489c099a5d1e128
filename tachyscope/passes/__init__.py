"""Which passes to run: of denoising, fewer of them; of token models, several places in one."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

from torch import Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.features import Features
from tachyscope.core.policy import Policy
from tachyscope.core.types import DenoisePass, Shape
from tachyscope.core.work import Work


class Calls(Protocol):
    """What sampling a frame by drafts asks of a session."""

    shape: Shape
    work: Work

    def retract(self, n: int) -> None: ...


class Drafter(Protocol):
    """What makes a token model's next frame several places a pass: its model, or the engine."""

    def feed(self, codes: Tensor, at: int) -> Tensor:
        """The trunk's states [B, S, W] of codes [V, S, D], which stand from place `at` on."""

    def draw(self, states: Tensor, noise: Tensor, logits: Tensor | None = None) -> Tensor:
        """Codes [V, S, D] for states [B, S, W] and noise [V, S, D, K].

        `logits` [V, S, D, K] is where the guided logits are left, if they are wanted.
        """

    def pick(self, logits: Tensor, noise: Tensor) -> Tensor:
        """Codes [V, N, D] of guided logits and noise [V, N, D, K]."""


class PassPolicy(Policy, question="passes"):
    """Decides which passes run."""

    splits_heads: ClassVar[bool] = True
    graph_capturable: ClassVar[bool] = True  # whether the host knows by itself which passes run

    def check_plan(self, plan: Mapping[str, Any], shape: Shape) -> None:
        replay = plan["replay"]
        fault = self.refusal(shape, replays=replay is not None and replay.decides)
        if fault is not None:
            raise TachyscopeError(f"{fault}, got passes={self}: use passes=all")

    @property
    def drafts_codes(self) -> bool:
        """Whether it makes a token model's frames by drafts, and needs no logits for them."""
        return False

    def refusal(self, shape: Shape, replays: bool) -> str | None:
        """Why the policy cannot serve this shape, or not beside replay that decides by token."""
        return None

    def sample_frame(
        self, session: Calls, features: Features, drafter: Drafter, noise: Tensor
    ) -> Tensor | None:
        """Codes [V, N, D] of a token model's frame, from noise [V, N, D, K].

        None: place by place, a pass each.
        """
        return None

    def keep_frame(self, features: Features, codes: Tensor, logits: Callable[[], Tensor]) -> None:
        """A token model was given a frame: codes [V, N, D], whose logits can be asked for."""


class SkipPolicy(PassPolicy):
    """Says how far a denoising pass is from the one before it.

    A pass is skipped while the distances since the last one that ran add up to less than
    `threshold`. A chunk's first pass, its last and the clean pass always run.
    """

    def refusal(self, shape: Shape, replays: bool) -> str | None:
        if shape.token_by_token:
            return "token models run one pass a token, so none can be skipped"
        if shape.rolling_frames:
            return "a rolling window runs one pass a chunk, so none can be skipped"
        return None

    @property
    @abc.abstractmethod
    def threshold(self) -> float:
        """0: every pass runs."""

    def distance(self, now: DenoisePass, before: DenoisePass, clean: Tensor) -> float:
        """From the pass before to this one; `clean` is the estimate in between."""
        return 1.0


def relative_change(now: Tensor, before: Tensor) -> Tensor:
    """mean |now - before| / mean |before|."""
    return (now - before).abs().mean() / before.abs().mean()


class PassRunner:
    """Which passes over the present chunk are skipped, and the clean estimate that then serves."""

    def __init__(self, policy: PassPolicy) -> None:
        self.policy = policy
        self.clean: Tensor | None = None  # of the last pass that ran
        self._before: DenoisePass | None = None
        self._total = 0.0  # distance since then

    def skips(self, now: DenoisePass) -> bool:
        """Whether `clean` serves for this pass."""
        policy, before, clean = self.policy, self._before, self.clean
        if not isinstance(policy, SkipPolicy) or not policy.threshold:
            return False
        self._before = now
        if now.index and now.index < now.count - 1:
            assert before is not None and clean is not None
            self._total += policy.distance(now, before, clean)
            if self._total < policy.threshold:
                return True
        self._total = 0.0
        return False
