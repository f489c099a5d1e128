"""Rooms that no training has seen, by number; and a walk through one, with its true frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tachyscope.errors import TachyscopeError
from tachyscope.worlds import atrium

# Training draws its rooms from seeds up to about 10^8, and its own scores from 2^31. torch's CPU
# generator keeps 32 bits of a seed, so these are the ones left: from here to 2^32.
UNSEEN = 3_000_000_000
WORLDS = 2**32 - UNSEEN
AT_ONCE = 16  # frames drawn together


@dataclass(frozen=True)
class World:
    """A room, where the walk begins in it, and what the prompt says."""

    number: int
    rooms: atrium.Rooms  # of one row
    start: Tensor  # [1, 3]
    prompt: str

    @property
    def view(self) -> tuple[float, float, float]:
        """The start as a model's camera is told it: in the room as the first frame faces it.

        x, y, and degrees to the left of the front wall.
        """
        pose = atrium.seen_from(self.start[0], atrium.facing(self.start[0]))
        x, y = pose[:2].clamp(atrium.NEAR, 1 - atrium.NEAR).double().tolist()
        low, high = atrium.NEAR, 1 - atrium.NEAR
        turned = float(pose[2]) * 360 / atrium.TURN
        return min(max(x, low), high), min(max(y, low), high), turned


def make_world(number: int, motion: float = 1.0) -> World:
    """Unseen room `number`: the same one for `--world`, `tachyscope eval` and Python.

    motion: how far things move on their own.
    """
    if not 0 <= number < WORLDS:
        raise TachyscopeError(f"a world is a number from 0 to {WORLDS - 1}, got {number}")
    generator = torch.Generator().manual_seed(UNSEEN + number)
    rooms = atrium.make_rooms(1, generator, motion)
    start = atrium.make_starts(1, generator)
    prompt = atrium.descriptions(rooms, 0)[int(atrium.facing(start[0]))]
    return World(number, rooms, start, prompt)


def stir_world(world: World) -> World:
    """The world with something that moves before the wall that its walk begins by looking at."""
    rooms = atrium.stir(world.rooms, world.start, torch.tensor([True]))
    prompt = atrium.descriptions(rooms, 0)[int(atrium.facing(world.start[0]))]
    return replace(world, rooms=rooms, prompt=prompt)


class Visit:
    """A walk through unseen room `number`: frame 0 is its start, frame i follows action i.

    motion: how far things move on their own. pace: steps that a frame takes. tempo: steps by
    which things move on in a frame; about as many as the walker's, if none is given.
    """

    def __init__(
        self,
        number: int,
        actions: Sequence[int],
        motion: float = 1.0,
        pace: float = 1.0,
        tempo: float | None = None,
    ) -> None:
        world = make_world(number, motion)
        self.rooms, self.prompt, self.view = world.rooms, world.prompt, world.view
        self.tempo = atrium.tempo_of(pace) if tempo is None else tempo
        self.pose = atrium.walk(world.start, torch.tensor([[0, *actions]]), pace)  # [1, T, 3]

    def __len__(self) -> int:
        return self.pose.shape[1]

    def new_frames(self, given: int = 1) -> Callable[[int, int], np.ndarray]:
        """The true frames from one number to another, counted from behind the `given` ones."""
        return lambda start, stop: self.frames(given + start, given + stop)

    def frames(self, start: int, stop: int) -> np.ndarray:
        """True frames uint8 [F, H, W, 3]."""
        pose, time = self.pose[0, start:stop], self.tempo * torch.arange(start, stop)
        return draw(self.rooms, pose, time)


def draw(rooms: atrium.Rooms, pose: Tensor, time: Tensor, size: int = atrium.SIZE) -> np.ndarray:
    """The true frames uint8 [F, size, size, 3] of the first room, at poses [F, 3] and times [F]."""
    parts = []
    # some at a time: drawing a frame takes 16 MB
    for where, when in zip(pose.split(AT_ONCE), time.split(AT_ONCE), strict=True):
        pictures = atrium.render(rooms.repeat(len(when)), where, when, size)
        levels = (255 * pictures.clamp(0, 1)).round().to(torch.uint8)
        parts.append(levels.permute(0, 2, 3, 1).cpu().numpy())
    # laid out as frames are: an encoder rounds otherwise for another layout of the same numbers
    return np.ascontiguousarray(np.concatenate(parts))
