"""Which passes to run: of denoising, fewer of them; of token models, several places in one."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import ClassVar, Protocol

from torch import Tensor

from tachyscope.meter import Meter
from tachyscope.types import DenoisePass, Shape, TokenFrame


class Calls(Protocol):
    """What sampling a frame by drafts asks of a session."""

    shape: Shape
    meter: Meter
    features: dict[str, Tensor]

    def retract(self, n: int) -> None: ...


class PassPolicy(abc.ABC):
    """Decides which passes run."""

    paper: ClassVar[str]
    graph_capturable: ClassVar[bool] = True  # whether the host knows by itself which passes run

    @property
    def drafts_codes(self) -> bool:
        """Whether it makes a token model's frames by drafts, and needs no logits for them."""
        return False

    def refusal(self, shape: Shape, replays: bool) -> str | None:
        """Why the policy cannot serve this shape, or not beside replay that decides by token."""
        return None

    def sample_frame(self, session: Calls, frame: TokenFrame) -> Tensor | None:
        """Codes [V, N, D] of a token model's frame; None: place by place, a pass each."""
        return None

    def keep_frame(
        self, features: dict[str, Tensor], codes: Tensor, logits: Callable[[], Tensor]
    ) -> None:
        """A token model was given a frame: codes [V, N, D], whose logits can be asked for."""
        return


class SkipPolicy(PassPolicy):
    """Says how far a denoising pass is from the one before it.

    A pass is skipped while the distances since the last one that ran add up to less than
    `threshold`. The first `warmup` passes over a chunk, its last and the clean pass always run.
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

    @property
    def warmup(self) -> int:
        return 1

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
        if now.index >= max(policy.warmup, 1) and now.index < now.count - 1:
            assert before is not None and clean is not None
            self._total += policy.distance(now, before, clean)
            if self._total < policy.threshold:
                return True
        self._total = 0.0
        return False
