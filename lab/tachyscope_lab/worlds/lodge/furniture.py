"""What stands and moves in rooms, as boxes, upright cylinders and ellipsoids."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from tachyscope_lab.worlds.lodge.materials import KINDS
from tachyscope_lab.worlds.lodge.palette import COLOURS
from tachyscope_lab.worlds.lodge.plan import HEIGHT, INNER, MIDDLE, OUTER, signs

if TYPE_CHECKING:
    from tachyscope_lab.worlds.lodge.houses import Houses

ITEMS = (
    "", "sofa", "table", "sideboard", "bench", "bookshelf", "plant", "column", "lamp", "statue",
    "armchair",
)  # fmt: skip
BY_WALLS = (0, 1, 2, 3, 4)
BY_CORNERS = (0, 5, 5, 6, 6, 7, 8, 9, 10)
MOVERS = ("", "ball", "balloon", "cart", "drone")
PERIOD = 16  # steps of a moving thing's path
NOWHERE = (0.0, 0.0, -50.0, 0.01, 0.01, 0.01)
WOOD, DARK = COLOURS.index("brown"), COLOURS.index("black")
WHITE, GREEN = COLOURS.index("white"), COLOURS.index("green")
FIRST, SECOND = -1, -2  # an item's own colours

# a part: middle and half of the size along the wall, away from it and upward; material; colour
Part = tuple[float, float, float, float, float, float, str, int]
BOXES: dict[str, tuple[Part, ...]] = {
    "sofa": (
        (0, 0.44, 0.23, 0.8, 0.33, 0.19, "fabric", FIRST),
        (0, 0.14, 0.5, 0.8, 0.13, 0.32, "fabric", FIRST),
        (-0.9, 0.4, 0.32, 0.11, 0.38, 0.3, "fabric", FIRST),
        (0.9, 0.4, 0.32, 0.11, 0.38, 0.3, "fabric", FIRST),
    ),
    "table": (
        (0, 0.38, 0.74, 0.85, 0.34, 0.03, "wood", WOOD),
        (-0.76, 0.38, 0.355, 0.035, 0.3, 0.355, "wood", WOOD),
        (0.76, 0.38, 0.355, 0.035, 0.3, 0.355, "wood", WOOD),
        (-0.3, 0.38, 0.84, 0.2, 0.13, 0.07, "books", FIRST),
    ),
    "sideboard": (
        (0, 0.28, 0.45, 0.85, 0.25, 0.35, "drawers", FIRST),
        (0, 0.27, 0.05, 0.76, 0.2, 0.05, "plain", DARK),
        (0, 0.29, 0.82, 0.88, 0.27, 0.02, "wood", WOOD),
        (0.45, 0.25, 0.97, 0.2, 0.07, 0.13, "plain", SECOND),
    ),
    "bench": (
        (0, 0.3, 0.42, 0.85, 0.24, 0.035, "wood", WOOD),
        (-0.62, 0.3, 0.19, 0.05, 0.2, 0.19, "wood", WOOD),
        (0.62, 0.3, 0.19, 0.05, 0.2, 0.19, "wood", WOOD),
        (0, 0.3, 0.49, 0.55, 0.2, 0.035, "fabric", FIRST),
    ),
    "bookshelf": (
        (0, 0.17, 0.96, 0.41, 0.14, 0.94, "books", FIRST),
        (-0.43, 0.19, 0.96, 0.025, 0.19, 0.96, "wood", WOOD),
        (0.43, 0.19, 0.96, 0.025, 0.19, 0.96, "wood", WOOD),
        (0, 0.19, 1.945, 0.455, 0.2, 0.025, "wood", WOOD),
    ),
    "plant": ((0, 0.42, 0.6, 0.025, 0.025, 0.25, "wood", WOOD),),
    "column": (
        (0, 0.42, 0.09, 0.3, 0.3, 0.09, "stone", FIRST),
        (0, 0.42, 2.61, 0.28, 0.28, 0.09, "stone", FIRST),
    ),
    "lamp": ((0, 0.42, 0.02, 0.17, 0.17, 0.02, "plain", DARK),),
    "statue": (
        (0, 0.42, 0.5, 0.2, 0.2, 0.46, "stone", WHITE),
        (0, 0.42, 0.98, 0.24, 0.24, 0.025, "stone", WHITE),
        (0, 0.42, 0.03, 0.25, 0.25, 0.03, "stone", WHITE),
    ),
    "armchair": (
        (0, 0.46, 0.22, 0.3, 0.3, 0.2, "fabric", FIRST),
        (0, 0.16, 0.5, 0.42, 0.13, 0.38, "fabric", FIRST),
        (-0.36, 0.46, 0.3, 0.07, 0.32, 0.28, "fabric", FIRST),
        (0.36, 0.46, 0.3, 0.07, 0.32, 0.28, "fabric", FIRST),
    ),
}
CYLINDERS: dict[str, tuple[Part, ...]] = {
    "table": ((0.62, 0.3, 0.79, 0.08, 0.08, 0.02, "plain", DARK),),
    "sideboard": ((-0.5, 0.28, 0.94, 0.1, 0.1, 0.1, "plain", SECOND),),
    "plant": ((0, 0.42, 0.22, 0.22, 0.22, 0.22, "stripes", FIRST),),
    "column": ((0, 0.42, 1.35, 0.21, 0.21, 1.17, "stone", FIRST),),
    "lamp": ((0, 0.42, 0.75, 0.022, 0.022, 0.75, "plain", DARK),),
}
ELLIPSOIDS: dict[str, tuple[Part, ...]] = {
    "sofa": (
        (-0.42, 0.33, 0.6, 0.24, 0.1, 0.2, "fabric", SECOND),
        (0.4, 0.33, 0.6, 0.24, 0.1, 0.2, "fabric", SECOND),
    ),
    "table": (
        (0.3, 0.4, 0.93, 0.11, 0.11, 0.16, "gloss", SECOND),
        (0.62, 0.3, 0.98, 0.15, 0.15, 0.13, "glow", WHITE),
    ),
    "sideboard": ((-0.5, 0.28, 1.2, 0.2, 0.2, 0.19, "leaves", GREEN),),
    "bookshelf": ((0, 0.19, 2.1, 0.13, 0.13, 0.14, "gloss", SECOND),),
    "plant": (
        (0, 0.42, 1.08, 0.37, 0.37, 0.38, "leaves", GREEN),
        (0.06, 0.45, 1.5, 0.25, 0.25, 0.3, "leaves", GREEN),
    ),
    "lamp": ((0, 0.42, 1.62, 0.24, 0.24, 0.2, "glow", FIRST),),
    "statue": (
        (0, 0.42, 1.16, 0.1, 0.1, 0.17, "gloss", FIRST),
        (0, 0.42, 1.42, 0.17, 0.17, 0.18, "gloss", FIRST),
    ),
    "armchair": ((0, 0.36, 0.56, 0.22, 0.1, 0.2, "fabric", SECOND),),
}


@dataclass(frozen=True)
class Solids:
    """The parts of all that stands and moves, for F frames: boxes, then cylinders, ellipsoids."""

    middle: Tensor  # [F, N, 3]
    half: Tensor  # [F, N, 3]
    material: Tensor  # [F, N]
    colour: Tensor  # [F, N, 2] two of the palette's
    owner: (
        Tensor  # [N] the piece of furniture (0..15), the pendant lamp (16..19), the mover (20..27)
    )
    boxes: int
    cylinders: int


def _table(parts: dict[str, tuple[Part, ...]], most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Places and sizes [items, most, 6], materials [items, most] and colours [items, most]."""
    place = torch.tensor(NOWHERE).repeat(len(ITEMS), most, 1)
    material, colour = (torch.zeros(len(ITEMS), most, dtype=torch.long) for _ in range(2))
    for name, rows in parts.items():
        for i, row in enumerate(rows):
            at = ITEMS.index(name), i
            place[at] = torch.tensor(row[:6])
            material[at], colour[at] = KINDS.index(row[6]), row[7]
    return place, material, colour


_TABLES = _table(BOXES, 4), _table(CYLINDERS, 1), _table(ELLIPSOIDS, 2)


# for the slots of a room: whether its wall is the outer one across x, and the middle along the wall
_CORNER_ACROSS_X = (True, True, False, False)  # outer corner, by each doorway's wall, inner corner
_CORNER_ALONG = (OUTER - 0.5, INNER + 0.55, INNER + 0.55, INNER + 0.55)


def _slots(houses: Houses) -> tuple[Tensor, Tensor, Tensor]:
    """Of each slot [B, 16]: whether it faces x, where along the wall, if by an inner wall."""
    device = houses.corner.device
    corner = houses.corner.unflatten(1, (4, 2))
    across = torch.tensor(_CORNER_ACROSS_X, device=device)[corner]
    along = torch.tensor(_CORNER_ALONG, device=device)[corner]
    wall = torch.tensor([True, False], device=device).expand(len(corner), 4, 2)
    across = torch.cat([wall, across], -1).flatten(1)
    along = torch.cat([torch.full_like(along, MIDDLE), along], -1).flatten(1)
    inner = torch.cat([torch.zeros_like(wall), corner == 3], -1).flatten(1)
    return across, along, inner


def _placed(parts: Tensor, houses: Houses) -> tuple[Tensor, Tensor]:
    """Middles and halves [B, 16, parts, 3] in the house of parts [B, 16, parts, 6]."""
    across, along, inner = (x[..., None] for x in _slots(houses))
    a, b, c, ha, hb, hc = parts.unbind(-1)
    away = torch.where(inner, INNER + b, OUTER - b)
    a = along + a
    x, y = torch.where(across, away, a), torch.where(across, a, away)
    hx, hy = torch.where(across, hb, ha), torch.where(across, ha, hb)
    side = signs(parts.device).repeat_interleave(4, 0)[:, None]  # [16, 1, 2]
    middle = torch.stack([x * side[..., 0], y * side[..., 1], c], -1)
    return middle, torch.stack([hx, hy, hc], -1)


def _moving(houses: Houses, time: Tensor) -> tuple[Tensor, Tensor]:
    """Where what moves is at times [B]: middles and halves [B, 8, 3]."""
    angle = 2 * math.pi * (time[:, None] / PERIOD + houses.beat)
    swing, other = angle.sin(), angle.cos()
    first, kind = houses.path == 0, houses.mover

    def among(*values: Tensor | float) -> Tensor:
        """The value of each mover's kind."""
        wide = [torch.as_tensor(v, device=time.device).expand_as(swing) for v in values]
        return torch.stack(wide, -1).gather(-1, kind[..., None])[..., 0]

    # a ball rolls around the room, a balloon rises and sinks over the furniture, a cart goes to
    # and fro along an outer wall, a drone flies an ellipse below the ceiling
    far = OUTER - 0.6
    u = among(0.0, MIDDLE + 1.15 * swing, far - 0.15, MIDDLE + 1.5 * swing, MIDDLE + 1.6 * swing)
    v = among(0.0, MIDDLE + 1.15 * other, MIDDLE + 1.3, OUTER - 1.0, MIDDLE + 1.1 * other)
    z = among(-50.0, 0.16, 1.75 + 0.35 * swing, 0.15, 2.1 + 0.12 * (2 * angle).sin())
    x, y = torch.where(first, u, v), torch.where(first, v, u)
    side = signs(time.device).repeat_interleave(2, 0)
    middle = torch.stack([x * side[:, 0], y * side[:, 1], z], -1)
    size = among(0.01, 0.16, 0.2, 0.22, 0.2), among(0.01, 0.16, 0.2, 0.14, 0.2)
    tall = among(0.01, 0.16, 0.25, 0.15, 0.07)
    hx, hy = torch.where(first, size[0], size[1]), torch.where(first, size[1], size[0])
    return middle, torch.stack([hx, hy, tall], -1)


def solids(houses: Houses, time: Tensor) -> Solids:
    """All parts in houses of F rows at times [F]."""
    device, frames = time.device, len(houses)
    # of boxes, cylinders and ellipsoids: the furniture's, a lamp's, the movers'
    middles: list[list[Tensor]] = []
    halves: list[list[Tensor]] = []
    materials: list[list[Tensor]] = []
    colours: list[list[Tensor]] = []
    owners: list[list[Tensor]] = []
    counts = []
    moving, size = _moving(houses, time)
    cart = (houses.mover == MOVERS.index("cart"))[..., None]
    none = torch.tensor(NOWHERE, device=device)
    lamp = F.pad(MIDDLE * signs(device), (0, 1), value=HEIGHT - 0.42)
    for number, table in enumerate(_TABLES):
        place, material, colour = (t.to(device)[houses.item] for t in table)
        middle, half = _placed(place, houses)
        own = torch.where(colour == FIRST, houses.item_colour[..., :1], houses.item_colour[..., 1:])
        colour = torch.where(colour < 0, own, colour)
        # a second colour for what has a pattern: that of the item
        second = houses.item_colour[..., 1:].expand_as(colour)
        middles.append([middle.flatten(1, 2)])
        halves.append([half.flatten(1, 2)])
        materials.append([material.flatten(1)])
        colours.append([torch.stack([colour, second], -1).flatten(1, 2)])
        owners.append([torch.arange(16).repeat_interleave(place.shape[2])])
        if number:  # a pendant lamp: its cord, and its shade
            cord = number == 1
            at = lamp + torch.tensor([0.0, 0.0, 0.21 * cord], device=device)
            wide = torch.tensor([0.012, 0.012, 0.21] if cord else [0.2, 0.2, 0.15], device=device)
            middles[-1].append(at.expand(frames, 4, 3))
            halves[-1].append(wide.expand(frames, 4, 3))
            kind = KINDS.index("plain" if cord else "glow")
            materials[-1].append(torch.full((frames, 4), kind, device=device))
            colours[-1].append(torch.full((frames, 4, 2), DARK if cord else WHITE, device=device))
            owners[-1].append(torch.arange(16, 20))
        if number != 1:  # what moves: carts are boxes, all else is round
            shown = cart if number == 0 else ~cart
            middles[-1].append(torch.where(shown, moving, none[:3]))
            halves[-1].append(torch.where(shown, size, none[3:]))
            kind = KINDS.index("drawers" if number == 0 else "gloss")
            materials[-1].append(torch.full((frames, 8), kind, device=device))
            colours[-1].append(houses.mover_colour[..., None].expand(-1, -1, 2))
            owners[-1].append(torch.arange(20, 28))
        counts.append(sum(part.shape[1] for part in middles[-1]))

    def joined(parts: list[list[Tensor]]) -> Tensor:
        return torch.cat([part for family in parts for part in family], 1)

    owner = torch.cat([part for family in owners for part in family]).to(device)
    return Solids(
        joined(middles), joined(halves), joined(materials), joined(colours), owner, counts[0],
        counts[1],
    )  # fmt: skip
