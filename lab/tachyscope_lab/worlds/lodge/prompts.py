"""What a prompt says of a house, and its words as numbers."""

from __future__ import annotations

import torch

from tachyscope.models.atrium.vocabulary import LENGTH as LENGTH
from tachyscope.models.atrium.vocabulary import Vocabulary
from tachyscope.models.atrium.vocabulary import pad as pad
from tachyscope_lab.worlds.lodge.camera import seen_from
from tachyscope_lab.worlds.lodge.furniture import ITEMS, MOVERS
from tachyscope_lab.worlds.lodge.houses import MOODS, MOVING, SLOTS, Houses
from tachyscope_lab.worlds.lodge.materials import KINDS, ON_FLOORS, ON_WALLS
from tachyscope_lab.worlds.lodge.palette import COLOURS
from tachyscope_lab.worlds.lodge.plan import ROOMS, WALLS, room_of, signs

# where a room lies in the house, as its walker faces when the first frame is seen
WHERE = ("back right", "front right", "back left", "front left")


def _room(houses: Houses, row: int, room: int) -> list[str]:
    """What is said of a room: its paint and, in full, a wall, the floor and what is in it."""
    walls = slice(WALLS * room, WALLS * (room + 1))
    kinds, paints = houses.wall[row, walls].tolist(), houses.wall_colour[row, walls, 0].tolist()
    plain = kinds.index(0)
    said = [f"{COLOURS[paints[plain]]} walls"]
    if not houses.said[row, room]:
        return said
    accent = next(i for i, kind in enumerate(kinds) if kind)
    said.append(f"{COLOURS[paints[accent]]} {KINDS[kinds[accent]]}")
    floor = KINDS[int(houses.floor[row, room])]
    said.append(f"{COLOURS[int(houses.floor_colour[row, room, 0])]} {floor}")
    slots = range(SLOTS * room, SLOTS * (room + 1))
    items = [i for i in slots if houses.item[row, i]]
    said += [
        f"{COLOURS[int(houses.item_colour[row, i, 0])]} {ITEMS[int(houses.item[row, i])]}"
        for i in items[:2]
    ]
    first = MOVING * room
    if houses.mover[row, first]:
        colour = COLOURS[int(houses.mover_colour[row, first])]
        said.append(f"{colour} {MOVERS[int(houses.mover[row, first])]}")
    return said


def descriptions(houses: Houses, row: int) -> list[str]:
    """The prompts of a house for each quarter being ahead.

    Never said: where things stand, second colours, windows, paintings, rugs, where the sun is.
    """
    rooms = [", ".join(_room(houses, row, room)) for room in range(ROOMS)]
    mood, side = MOODS[int(houses.mood[row])], signs()
    prompts = []
    for front in range(4):
        pose = torch.cat([side, torch.zeros(ROOMS, 1)], 1)
        turned = seen_from(pose, torch.full((ROOMS,), front))
        where = room_of(turned[:, 0], turned[:, 1]).tolist()
        parts = [f"{WHERE[place]} {rooms[where.index(place)]}" for place in (3, 1, 2, 0)]
        prompts.append(", ".join([mood, *parts]))
    return prompts


WORDS = tuple(
    sorted(
        {"walls", *" ".join(WHERE).split(), *MOODS, *COLOURS, *ITEMS[1:], *MOVERS[1:]}
        | {KINDS[kind] for kind in (*ON_WALLS, *ON_FLOORS)}
    )
)
tokenize = Vocabulary("Lodge", WORDS).tokenize
