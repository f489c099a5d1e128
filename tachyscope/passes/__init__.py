"""Which passes run: policies that skip denoising passes, or check several drafted tokens in one."""

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


class DraftSession(Protocol):
    """The parts of a session that sampling by drafts uses."""

    shape: Shape
    work: Work

    def retract(self, n: int) -> None: ...


class Drafter(Protocol):
    """Runs several tokens of a token model's next frame in a pass: the model, or the engine."""

    def feed(self, codes: Tensor, at: int) -> Tensor:
        """The trunk's states [B, S, W] of codes [V, S, D] at the places from `at` on."""

    def draw(self, states: Tensor, noise: Tensor, logits: Tensor | None = None) -> Tensor:
        """Codes [V, S, D] for states [B, S, W] and noise [V, S, D, K].

        The guided logits are written to `logits` [V, S, D, K], if it is given.
        """

    def pick(self, logits: Tensor, noise: Tensor) -> Tensor:
        """Codes [V, N, D] of guided logits and noise [V, N, D, K]."""


class PassPolicy(Policy, question="passes"):
    """Decides which passes run."""

    splits_heads: ClassVar[bool] = True
    graph_capturable: ClassVar[bool] = True  # whether no data decides which passes run

    def check_plan(self, plan: Mapping[str, Any], shape: Shape) -> None:
        replay = plan["replay"]
        fault = self.refusal(shape, replays=replay is not None and replay.per_token)
        if fault is not None:
            raise TachyscopeError(f"{fault}, got passes={self}: use passes=all")

    @property
    def drafts_codes(self) -> bool:
        """Whether it drafts a token model's frames without logits of the last one."""
        return False

    def refusal(self, shape: Shape, replays: bool) -> str | None:
        """Why it cannot serve this shape, or with `replays` a replay policy that decides for each
        token; None if it can."""
        return None

    def sample_frame(
        self, session: DraftSession, features: Features, drafter: Drafter, noise: Tensor
    ) -> Tensor | None:
        """Codes [V, N, D] of a token model's frame, or None to sample each token."""
        return None

    def keep_frame(self, features: Features, codes: Tensor, logits: Callable[[], Tensor]) -> None:
        """Store a given frame's codes [V, N, D] for drafts, and its `logits()` if they are used."""


class SkipPolicy(PassPolicy):
    """Skips denoising passes by their distance from the one before.

    A pass is skipped while the distances since the last one that ran sum to less than `threshold`.
    A chunk's first pass, its last and the clean pass always run.
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
        """The sum of distances at which a pass runs; 0 runs every pass."""

    def distance(self, now: DenoisePass, before: DenoisePass, clean: Tensor) -> float:
        """The distance of a pass from the one before; `clean` is the last clean estimate."""
        return 1.0


def relative_change(now: Tensor, before: Tensor) -> Tensor:
    """mean |now - before| / mean |before|."""
    return (now - before).abs().mean() / before.abs().mean()


class PassRunner:
    """Decides which passes over a chunk are skipped, and keeps the clean estimate to reuse."""

    def __init__(self, policy: PassPolicy) -> None:
        self.policy = policy
        self.clean: Tensor | None = None  # of the last pass that ran
        self._before: DenoisePass | None = None
        self._total = 0.0  # distance since then

    def skips(self, now: DenoisePass) -> bool:
        """Whether this pass is skipped, and `clean` reused."""
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
