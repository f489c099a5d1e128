"""Prompts that describe Atrium's rooms, and their vocabulary."""

from __future__ import annotations

from tachyscope.models.atrium.vocabulary import LENGTH as LENGTH
from tachyscope.models.atrium.vocabulary import Vocabulary
from tachyscope.models.atrium.vocabulary import pad as pad
from tachyscope.models.atrium.world import COLOURS, FLOOR, KINDS, SIDES, THINGS, Rooms


def _colouring(kind: int, colours: list[int]) -> str:
    first, second = (COLOURS[c] for c in colours)
    return f"is {first}" if kind == 0 else f"has {first} and {second} {KINDS[kind]}"


def _article(words: str) -> str:
    return f"an {words}" if words[0] in "aeiou" else f"a {words}"


def descriptions(rooms: Rooms, row: int) -> list[str]:
    """The prompts of a room seen with each of its walls ahead, which name walls by side.

    They never mention phases, sizes, paths, positions of things, the ceiling, and one or two walls.
    """
    kind, colour = rooms.kind[row].tolist(), rooms.colour[row].tolist()
    said, told = rooms.said[row].tolist(), rooms.told[row].tolist()
    thing, tint = rooms.thing[row].tolist(), rooms.tint[row].tolist()
    surfaces = [_colouring(k, c) for k, c in zip(kind, colour, strict=True)]
    things = [_article(f"{COLOURS[tint[i]]} {THINGS[thing[i]]}") for i in range(4) if told[i]]
    room = f"a room with {' and '.join(things)}" if things else "a room"
    prompts = []
    for front in range(4):
        order = [(side, (front + i) % 4) for i, side in enumerate(SIDES)]
        walls = [f"the {side} wall {surfaces[wall]}" for side, wall in order if said[wall]]
        prompts.append(", ".join([room, *walls, f"the floor {surfaces[FLOOR]}"]))
    return prompts


WORDS = tuple(
    sorted(
        {"a", "an", "and", "floor", "has", "is", "room", "the", "wall", "with"}
        | {*COLOURS, *KINDS, *SIDES, *THINGS[1:]}
    )
)
tokenize = Vocabulary("Atrium", WORDS).tokenize
