"""Whether a walk in a world by number shows its walls as they truly are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tachyscope.models.atrium.visit import Visit
from tachyscope.models.registry import MODELS
from tachyscope.serve.action_log import ActionLog, Step


class Walls:
    """The newest frame that faced each wall straight on, by the wall's number: from that of the
    first view to the left."""

    def __init__(self) -> None:
        self._faced: dict[int, tuple[int, Step, np.ndarray]] = {}
        self._judged: dict[int, dict[str, Any]] = {}

    def see(self, wall: int, chunk: int, step: Step, picture: np.ndarray) -> None:
        """Keep the frame of a step that faced a wall; the log may not have the step yet."""
        self._faced[wall] = chunk, step, picture

    def check(self, log: ActionLog) -> list[dict[str, Any]]:
        """For each wall that was faced: its chunk, picture, true picture, and whether it is right.

        May be called from any thread while the log grows.
        """
        faced = dict(self._faced)
        new = {wall for wall, one in faced.items() if self._chunk(wall) != one[0]}
        if new:
            last, step, _ = max(faced.values(), key=lambda one: one[0])
            visit = visit_of(log, [*log.steps[:last], step])
        for wall in new:
            chunk, _, picture = faced[wall]
            right = float(visit.walls_right(picture[None], chunk + 1)[0, wall])
            self._judged[wall] = {
                "wall": wall,
                "chunk": chunk,
                "right": None if math.isnan(right) else right == 1,
                "made": picture,
                "truth": visit.frames(chunk + 1, chunk + 2)[0],
            }
        return [dict(self._judged[wall]) for wall in sorted(faced)]

    def _chunk(self, wall: int) -> int | None:
        return self._judged[wall]["chunk"] if wall in self._judged else None


def visit_of(log: ActionLog, steps: Sequence[Step]) -> Visit:
    """The walk of these steps, one frame each; frame i is the view after i steps."""
    entry = MODELS[log.model]
    assert log.opening.world is not None
    letters = " ".join(step.actions or "." for step in steps)
    return Visit(log.opening.world, letters, pace=entry.pace, tempo=entry.tempo)
