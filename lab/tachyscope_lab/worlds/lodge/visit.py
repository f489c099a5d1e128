"""Houses that no training has seen, by number, and the true frames of a walk through one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.models.atrium.visit import UNSEEN, WORLDS
from tachyscope_lab.worlds.lodge import camera, prompts
from tachyscope_lab.worlds.lodge.houses import Houses, make_houses
from tachyscope_lab.worlds.lodge.picture import SIZE, render

# The seeds are split as Atrium's are: training below 10^8 and its own scores from 2^31, these above
AT_ONCE = 16  # frames drawn together


@dataclass(frozen=True)
class World:
    """A house, where the walk begins in it, and what the prompt says."""

    number: int
    houses: Houses  # of one row
    start: Tensor  # [1, 3]
    prompt: str

    def frames(self, pose: Tensor, time: Tensor, size: int = SIZE) -> np.ndarray:
        """True frames uint8 [F, size, size, 3] from poses [F, 3] at times [F]."""
        parts = []
        for where, when in zip(pose.split(AT_ONCE), time.split(AT_ONCE), strict=True):
            pictures = render(self.houses.to(pose.device).repeat(len(when)), where, when, size)
            parts.append((255 * pictures).round().byte().permute(0, 2, 3, 1).cpu().numpy())
        return np.ascontiguousarray(np.concatenate(parts))


def make_world(number: int, motion: bool = True) -> World:
    """Unseen house `number`, alike wherever it is asked for; without motion all stands still."""
    if not 0 <= number < WORLDS:
        raise TachyscopeError(f"a world is a number from 0 to {WORLDS - 1}, got {number}")
    generator = torch.Generator().manual_seed(UNSEEN + number)
    houses = make_houses(1, generator, motion)
    start = camera.make_starts(1, generator)
    prompt = prompts.descriptions(houses, 0)[int(camera.facing(start[0]))]
    return World(number, houses, start, prompt)
