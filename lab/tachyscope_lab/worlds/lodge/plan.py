"""The floor plan, the same in every house: four rooms in a square, a doorway between neighbours.

Lengths are metres, and the origin is the middle of the house. Room r has x > 0 where r is odd and
y > 0 where r is 2 or 3. All rooms are mirror images: "local" places are (|x|, |y|), so that the two
outer walls of a room are at OUTER and its two inner walls at INNER, whichever room it is. Walls
of a room are 0 (outer, across x), 1 (outer, across y), 2 (inner, across x), 3 (inner, across y).
"""

from __future__ import annotations

import torch
from torch import Tensor

ROOMS, WALLS = 4, 4
INNER, OUTER, HEIGHT = 0.1, 4.9, 2.7
MIDDLE = 2.5  # of a room, and of its doorways and windows
DOOR, LINTEL = 0.7, 2.1  # half the width of a doorway, and its height
WINDOW, SILL, TOP, REVEAL = 1.0, 0.85, 2.25, 0.22  # half the width, the height, and the depth
MARGIN = 1.0  # closest that a walker comes to a wall: what stands there is never in the way
CLEAR = 0.3  # closest that a walker comes to the side of a doorway


def room_of(x: Tensor, y: Tensor) -> Tensor:
    return (x > 0).long() + 2 * (y > 0).long()


def is_free(x: Tensor, y: Tensor) -> Tensor:
    """Whether a walker may stand there."""
    x, y = x.abs(), y.abs()
    reach = OUTER - MARGIN
    way = DOOR - CLEAR
    by_door_x, by_door_y = ((p - MIDDLE).abs() <= way for p in (x, y))
    inside = (x <= reach) & (y <= reach)
    return inside & ((x >= INNER + MARGIN) | by_door_y) & ((y >= INNER + MARGIN) | by_door_x)


def signs(device: torch.device | str = "cpu") -> Tensor:
    """The sides [4, 2] of x and y on which each room lies."""
    return torch.tensor([[-1.0, -1.0], [1.0, -1.0], [-1.0, 1.0], [1.0, 1.0]], device=device)
