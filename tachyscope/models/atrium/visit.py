"""Unseen rooms by number, and a walk through one with its true frames."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.models.atrium import prompts
from tachyscope.models.atrium import world as atrium
from tachyscope.models.atrium.surfaces import REGION, SMALL, surfaces_right, true_surfaces
from tachyscope.models.atrium.world import OBJECTS

# Training uses seeds up to about 10^8, and its evaluation those from 2^31. torch's CPU generator
# keeps 32 bits of a seed, so seeds from here to 2^32 are unseen.
UNSEEN = 3_000_000_000
WORLDS = 2**32 - UNSEEN
AT_ONCE = 16  # frames rendered together
NEAR = 0.25  # distance of two colours (RGB from 0 to 1) that count as equal


class Seen(NamedTuple):
    """How the surfaces in view are shown in frames."""

    wrong: np.ndarray  # bool [F, H, W]: pixels of wrong surfaces
    right: int  # number of right surfaces, over all frames
    judged: int  # number of judged surfaces


@dataclass(frozen=True)
class World:
    """A room, the start of a walk in it, and its prompt."""

    number: int
    rooms: atrium.Rooms  # of one row
    start: Tensor  # [1, 3]
    prompt: str

    @property
    def view(self) -> tuple[float, float, float]:
        """The start in coordinates of the wall that the first frame faces, as models take it.

        x, y, and degrees to the left of that wall.
        """
        pose = atrium.seen_from(self.start[0], atrium.facing(self.start[0]))
        x, y = pose[:2].clamp(atrium.NEAR, 1 - atrium.NEAR).double().tolist()
        low, high = atrium.NEAR, 1 - atrium.NEAR
        turned = float(pose[2]) * 360 / atrium.TURN
        return min(max(x, low), high), min(max(y, low), high), turned


def make_world(number: int, motion: float = 1.0) -> World:
    """Unseen room `number`, the same for `--world`, `tachyscope-lab eval` and Python.

    motion: scale of the things' own motion.
    """
    if not 0 <= number < WORLDS:
        raise TachyscopeError(f"a world is a number from 0 to {WORLDS - 1}, got {number}")
    generator = torch.Generator().manual_seed(UNSEEN + number)
    rooms = atrium.make_rooms(1, generator, motion)
    start = atrium.make_starts(1, generator)
    prompt = prompts.descriptions(rooms, 0)[int(atrium.facing(start[0]))]
    return World(number, rooms, start, prompt)


def stir_world(world: World) -> World:
    """The world with a moving thing in front of the wall that the walk first faces."""
    rooms = atrium.stir(world.rooms, world.start, torch.tensor([True]))
    prompt = prompts.descriptions(rooms, 0)[int(atrium.facing(world.start[0]))]
    return replace(world, rooms=rooms, prompt=prompt)


def _numbers(actions: str | Sequence[int]) -> list[int]:
    """Actions by their indices, of letters with counts (`q*4 w`) or of indices."""
    known = range(len(atrium.ACTIONS))
    if not isinstance(actions, str):
        if not all(isinstance(x, int | np.integer) and x in known for x in actions):
            raise TachyscopeError(
                f"the actions of a visit are letters of {atrium.ACTIONS!r} with counts, or indices "
                f"from 0 to {len(known) - 1}: try 'q*4 w'"
            )
        return [int(x) for x in actions]
    words = [
        re.fullmatch(rf"([{re.escape(atrium.ACTIONS)}])(?:\*(\d{{1,6}}))?", x)
        for x in actions.split()
    ]
    if None in words:
        raise TachyscopeError(
            f"the actions of a visit are letters of {atrium.ACTIONS!r}, each with *count, got "
            f"{actions[:60]!r}: try 'q*4 w'"
        )
    return [atrium.ACTIONS.index(x[1]) for x in words if x for _ in range(int(x[2] or 1))]


class Visit:
    """A walk through unseen room `number`: frame 0 is its start, frame i follows action i.

    motion: scale of the things' own motion. pace: steps of the walk a frame. tempo: steps of moving
    things a frame; by default about the pace.
    """

    def __init__(
        self,
        number: int,
        actions: str | Sequence[int] = (),
        motion: float = 1.0,
        pace: float = 1.0,
        tempo: float | None = None,
    ) -> None:
        world = make_world(number, motion)
        self.rooms, self.prompt, self.view = world.rooms, world.prompt, world.view
        self.tempo = atrium.tempo_of(pace) if tempo is None else tempo
        self.pose = atrium.walk(
            world.start, torch.tensor([[0, *_numbers(actions)]]), pace
        )  # [1, T, 3]

    def __len__(self) -> int:
        return self.pose.shape[1]

    def new_frames(self, given: int = 1) -> Callable[[int, int], np.ndarray]:
        """A function of (start, stop) that renders true frames, counted after the given ones."""
        return lambda start, stop: self.frames(given + start, given + stop)

    def judge(self, given: int = 1) -> Callable[[np.ndarray, int], Seen]:
        """A function that judges frames from a number on, counted after the given ones."""

        def seen(frames: np.ndarray, start: int) -> Seen:
            right, pose, time = self._right(frames, given + start)
            size = frames.shape[1]
            rooms = self.rooms.repeat(len(frames))
            shown = atrium.see(rooms, pose, time.float(), size).flatten(1)
            wrong = (right == 0).gather(1, shown).view(-1, size, size)
            judged = ~right.isnan()
            return Seen(wrong.numpy(), int((right == 1).sum()), int(judged.sum()))

        return seen

    def walls_right(self, frames: np.ndarray, start: int) -> Tensor:
        """Whether frames from number `start` on show each wall right: 1, 0 or NaN, [F, 4].

        Walls are counted to the left from the one first faced; NaN if too little is in view. A wall
        is right if 9 of 10 of its pixels are, and half of those of the thing in front of it.
        """
        pose = self.pose[0, start : start + len(frames)]
        time = self.tempo * torch.arange(start, start + len(frames)).float()
        rooms = self.rooms.repeat(len(frames))
        seen = F.one_hot(atrium.see(rooms, pose, time, SMALL).flatten(1), OBJECTS + 4).float()
        small = F.interpolate(_pictures(frames), size=(SMALL, SMALL), mode="area")
        near = (small - atrium.render(rooms, pose, time, SMALL)).norm(dim=1).flatten(1) < NEAR
        share = (near[..., None] * seen).sum(1) / seen.sum(1)  # NaN where nothing is in view
        walls = (atrium.facing(self.pose[0, 0]) + torch.arange(4)) % 4
        right = (share[:, walls] >= 0.9) & ~(share[:, OBJECTS + walls] < 0.5)
        return right.float().masked_fill(seen.mean(1)[:, walls] < REGION, math.nan)

    def _right(self, frames: np.ndarray, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """`surfaces_right` of frames from number `start` on, their poses and times."""
        pose = self.pose[0, start : start + len(frames)]
        time = self.tempo * torch.arange(start, start + len(frames))
        truth = true_surfaces(self.rooms, pose, time.float())
        return surfaces_right(_pictures(frames), self.rooms, truth), pose, time

    def frames(self, start: int, stop: int) -> np.ndarray:
        """True frames uint8 [F, H, W, 3]."""
        pose, time = self.pose[0, start:stop], self.tempo * torch.arange(start, stop)
        return draw(self.rooms, pose, time)


def _pictures(frames: np.ndarray) -> Tensor:
    """Frames uint8 [F, H, W, 3] as [F, 3, H, W] in 0..1."""
    return torch.from_numpy(frames.copy()).permute(0, 3, 1, 2).float() / 255


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
