"""Random houses: how rooms are painted and furnished, what moves in them, and their light."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Generator, Tensor

from tachyscope_lab.worlds.lodge.furniture import BY_CORNERS, BY_WALLS, MOVERS
from tachyscope_lab.worlds.lodge.materials import ON_FLOORS, ON_WALLS
from tachyscope_lab.worlds.lodge.palette import COLOURS, LIGHT, PAINTS, VIVID, WARM
from tachyscope_lab.worlds.lodge.plan import ROOMS, WALLS

SLOTS = 4  # pieces of furniture of a room: two by outer walls, two in corners
CORNERS = 4
MOVING = 2  # things that move, in each room
MOODS = ("morning", "noon", "evening", "overcast")


@dataclass(frozen=True)
class Houses:
    """Houses in one batch, everything [B, ...]; a room's walls, slots and movers lie together."""

    wall: Tensor  # [B, 16] material
    wall_colour: Tensor  # [B, 16, 2]
    floor: Tensor  # [B, 4] material
    floor_colour: Tensor  # [B, 4, 2]
    rug: Tensor  # [B, 4] whether there is one
    rug_colour: Tensor  # [B, 4, 2]
    window: Tensor  # [B, 4, 2] whether an outer wall has a window; else it has a painting
    art: Tensor  # [B, 4, 2, 3] colours of the paintings
    item: Tensor  # [B, 16] piece of furniture; 0 is none
    item_colour: Tensor  # [B, 16, 2]
    corner: Tensor  # [B, 8] where the two pieces in corners stand
    mover: Tensor  # [B, 8] what moves; 0 is nothing
    mover_colour: Tensor  # [B, 8]
    path: Tensor  # [B, 8] on which of its paths
    beat: Tensor  # [B, 8] phase of that motion, in periods
    mood: Tensor  # [B] time of the day
    sun: Tensor  # [B] from where it shines, as an angle
    said: Tensor  # [B, 4] whether the prompt describes a room in full

    def __len__(self) -> int:
        return len(self.wall)

    def to(self, device: torch.device | str) -> Houses:
        return Houses(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    def rows(self, index: Tensor | slice) -> Houses:
        return Houses(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def repeat(self, count: int) -> Houses:
        """The first house, so many times."""
        return self.rows(torch.zeros(count, dtype=torch.long))


def make_houses(count: int, generator: Generator, motion: bool = True) -> Houses:
    """Random houses; without motion nothing in them moves on its own."""

    def uniform(*shape: int) -> Tensor:
        return torch.rand(count, *shape, generator=generator)

    def pick(options: tuple[int, ...], *shape: int) -> Tensor:
        index = torch.randint(len(options), (count, *shape), generator=generator)
        return torch.tensor(options)[index]

    def other(first: Tensor, options: tuple[int, ...]) -> Tensor:
        """One of the options that is not `first`."""
        second = pick(options, *first.shape[1:])
        after = torch.tensor([options[(options.index(c) + 1) % len(options)] if c in options else c
                              for c in range(len(COLOURS))])  # fmt: skip
        return torch.where(second == first, after[second], second)

    # a room has one paint, and two walls of another treatment
    paint = pick(LIGHT, ROOMS, 1).expand(-1, -1, WALLS)
    accent = torch.stack([uniform(ROOMS, WALLS).argsort(-1)]).argsort(-1)[0] < 2
    wall = torch.where(accent, pick(ON_WALLS, ROOMS, WALLS), 0).flatten(1)
    first = torch.where(accent, pick(PAINTS, ROOMS, WALLS), paint).flatten(1)
    wall_colour = torch.stack([first, other(first, LIGHT)], -1)

    floor = pick(ON_FLOORS, ROOMS)
    floor_first = pick(WARM, ROOMS)
    rug_first = pick(VIVID, ROOMS)
    # at least one window a room
    window = uniform(ROOMS, 2) < 0.7
    window[..., 0] |= ~window.any(-1)
    things = torch.cat([pick(BY_WALLS, ROOMS, 2), pick(BY_CORNERS, ROOMS, 2)], -1)
    item_first = pick(VIVID, ROOMS * SLOTS)
    corner = uniform(ROOMS, CORNERS).argsort(-1)[..., :2].flatten(1)
    kinds = torch.stack([1 + torch.randint(len(MOVERS) - 1, (count, ROOMS), generator=generator),
                         pick((0, *range(len(MOVERS))), ROOMS)], -1)  # fmt: skip
    return Houses(
        wall=wall,
        wall_colour=wall_colour,
        floor=floor,
        floor_colour=torch.stack([floor_first, other(floor_first, WARM)], -1),
        rug=uniform(ROOMS) < 0.5,
        rug_colour=torch.stack([rug_first, other(rug_first, VIVID)], -1),
        window=window,
        art=pick(VIVID, ROOMS, 2, 3),
        item=things.flatten(1),
        item_colour=torch.stack([item_first, other(item_first, VIVID)], -1),
        corner=corner,
        mover=kinds.flatten(1) * motion,
        mover_colour=pick(VIVID, ROOMS * MOVING),
        path=torch.randint(2, (count, ROOMS * MOVING), generator=generator),
        beat=uniform(ROOMS * MOVING),
        mood=torch.randint(len(MOODS), (count,), generator=generator),
        sun=2 * math.pi * uniform(),
        said=uniform(ROOMS) < 0.7,
    )
