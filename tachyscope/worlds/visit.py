"""A walk through one room that no training has seen, with its true frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from tachyscope.errors import TachyscopeError
from tachyscope.worlds import atrium

# Training draws its rooms from seeds far below. torch's CPU generator keeps 32 bits of a seed, so
# the offset must leave room under 2**32.
UNSEEN, WORLDS = 4_000_000_000, 100_000_000
AT_ONCE = 16  # frames drawn together


class Visit:
    """Room `seed` of the unseen ones: frame 0 is its start, frame i follows action i.

    motion: how far things move on their own. pace: steps that a frame takes. tempo: steps by
    which things move on in a frame; as many as the walker's, if none is given.
    """

    def __init__(
        self,
        seed: int,
        moves: Sequence[int],
        motion: float = 1.0,
        pace: float = 1.0,
        tempo: float | None = None,
    ) -> None:
        if not 0 <= seed < WORLDS:
            raise TachyscopeError(f"a world is a number from 0 to {WORLDS - 1}, got {seed}")
        generator = torch.Generator().manual_seed(UNSEEN + seed)
        self.rooms = atrium.make_rooms(1, generator, motion)
        start = atrium.make_starts(1, generator)
        actions = torch.tensor([[0, *moves]])
        self.tempo = pace if tempo is None else tempo
        self.pose = atrium.walk(start, actions, pace)  # [1, T, 3]
        self.prompt = atrium.descriptions(self.rooms, 0)[int(atrium.facing(start[0]))]

    def __len__(self) -> int:
        return self.pose.shape[1]

    def new_frames(self, given: int = 1) -> Callable[[int, int], np.ndarray]:
        """The true frames from one number to another, counted from behind the `given` ones."""
        return lambda start, stop: self.frames(given + start, given + stop)

    def frames(self, start: int, stop: int) -> np.ndarray:
        """True frames uint8 [F, H, W, 3]."""
        # some at a time: drawing a frame takes 16 MB
        edges = [*range(start, max(stop, start + 1), AT_ONCE), stop]
        return np.concatenate([self._draw(a, b) for a, b in zip(edges, edges[1:], strict=False)])

    def _draw(self, start: int, stop: int) -> np.ndarray:
        frame = torch.arange(start, stop)
        rooms = self.rooms.rows(torch.zeros_like(frame))
        pixels = atrium.render(rooms, self.pose[0, start:stop], self.tempo * frame)  # [F, 3, H, W]
        levels = (255 * pixels.clamp(0, 1)).round().to(torch.uint8).permute(0, 2, 3, 1)
        # laid out as frames are: an encoder rounds otherwise for another layout of the same numbers
        return levels.contiguous().numpy()
