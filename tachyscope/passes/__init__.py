"""Which passes to run: policies that let a pass's clean estimate serve for those after it."""

from __future__ import annotations

import abc
from typing import ClassVar

from torch import Tensor

from tachyscope.types import DenoisePass


class PassPolicy(abc.ABC):
    """Says how far a denoising pass is from the one before it.

    A pass is skipped while the distances since the last one that ran add up to less than
    `threshold`. The first `warmup` passes over a chunk, its last and the clean pass always run.
    """

    paper: ClassVar[str]
    graph_capturable: ClassVar[bool] = True  # whether the host knows distances by itself

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
        if not policy.threshold:
            return False
        self._before = now
        if now.index >= max(policy.warmup, 1) and now.index < now.count - 1:
            assert before is not None and clean is not None
            self._total += policy.distance(now, before, clean)
            if self._total < policy.threshold:
                return True
        self._total = 0.0
        return False
