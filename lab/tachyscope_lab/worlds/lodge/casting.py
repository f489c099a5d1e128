"""What rays meet first: the building, then what stands in it. Exact for boxes, cylinders, balls."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tachyscope_lab.worlds.lodge.camera import EYE
from tachyscope_lab.worlds.lodge.furniture import Solids
from tachyscope_lab.worlds.lodge.plan import DOOR, HEIGHT, INNER, LINTEL, MIDDLE, OUTER

FAR = 1e4


@dataclass(frozen=True)
class Rays:
    """Rays [F, P] from eyes [F, 1]; a direction's part straight ahead is 1, so depth is as seen."""

    ox: Tensor
    oy: Tensor
    dx: Tensor
    dy: Tensor
    dz: Tensor

    def at(self, depth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.ox + depth * self.dx, self.oy + depth * self.dy, EYE + depth * self.dz


@dataclass(frozen=True)
class Shell:
    """Where rays [F, P] meet the building."""

    depth: Tensor
    axis: Tensor  # 0, 1, 2: what the surface is across
    jamb: Tensor  # whether it is the inside of a doorway


def nonzero(x: Tensor) -> Tensor:
    return torch.where(x.abs() < 1e-7, 1e-7, x)


def _wall(across: Tensor, along: Tensor, d: Tensor, e: Tensor, dz: Tensor) -> tuple[Tensor, ...]:
    """Depth at which rays meet an inner wall with its two doorways; whether inside one, by height.

    across, d: place and direction across the wall; along, e: along it.
    """
    one, two = (-INNER - across) / d, (INNER - across) / d
    enter, leave = torch.minimum(one, two).clamp(min=0), torch.maximum(one, two)
    met = along + enter * e
    side = torch.where(met > 0, MIDDLE, -MIDDLE)
    height = EYE + enter * dz
    hole = ((met - side).abs() < DOOR) & (height < LINTEL)
    # through the doorway, unless its side or its lintel comes first
    to_side = (side + torch.where(e > 0, DOOR, -DOOR) - along) / e
    to_lintel = torch.where(dz > 0, (LINTEL - EYE) / dz, FAR)
    inside = torch.minimum(to_side, to_lintel)
    inside = torch.where(inside < leave, inside, FAR)
    depth = torch.where(hole, inside, enter)
    return torch.where(leave > 0, depth, FAR), hole, to_lintel < to_side


def meet_shell(rays: Rays) -> Shell:
    ox, oy, dx, dy, dz = rays.ox, rays.oy, rays.dx, rays.dy, rays.dz
    to_x = (torch.where(dx > 0, OUTER, -OUTER) - ox) / dx
    to_y = (torch.where(dy > 0, OUTER, -OUTER) - oy) / dy
    to_z = (torch.where(dz > 0, HEIGHT, 0.0) - EYE) / dz
    depth = torch.minimum(torch.minimum(to_x, to_y), to_z)
    axis = torch.where(to_z <= depth, 2, torch.where(to_x <= depth, 0, 1))
    jamb = torch.zeros_like(axis, dtype=torch.bool)
    for number, parts in enumerate(((ox, oy, dx, dy), (oy, ox, dy, dx))):
        wall, hole, lintel = _wall(*parts, dz)
        nearer = wall < depth
        side = torch.where(lintel, 2, 1 - number)
        axis = torch.where(nearer, torch.where(hole, side, number), axis)
        jamb = torch.where(nearer, hole, jamb)
        depth = torch.where(nearer, wall, depth)
    return Shell(depth, axis, jamb)


def _per_ray(value: Tensor) -> Tensor:
    return value[..., None]


def _nearest(depth: Tensor) -> tuple[Tensor, Tensor]:
    least = depth.min(-1)
    return least.values, least.indices


def meet_boxes(origin: Tensor, rays: Rays, middle: Tensor, half: Tensor) -> tuple[Tensor, Tensor]:
    """The depth and the number of the first box [F, N, 3] that rays [F, P] enter; FAR for none."""
    enter = leave = None
    for i, d in enumerate((rays.dx, rays.dy, rays.dz)):
        inverse = _per_ray(1 / d)
        to = (middle[..., i] - origin[..., i : i + 1])[:, None] * inverse
        wide = half[:, None, :, i] * inverse.abs()
        low, high = to - wide, to + wide
        enter = low if enter is None else torch.maximum(enter, low)
        leave = high if leave is None else torch.minimum(leave, high)
    assert enter is not None and leave is not None
    return _nearest(torch.where((enter < leave) & (enter > 0), enter, FAR))


def meet_cylinders(
    origin: Tensor, rays: Rays, middle: Tensor, half: Tensor
) -> tuple[Tensor, Tensor]:
    """The same of upright cylinders, whose radius is half[..., 0]."""
    dx, dy, dz = (_per_ray(d) for d in (rays.dx, rays.dy, rays.dz))
    gx, gy, gz = ((origin[..., i : i + 1] - middle[..., i])[:, None] for i in range(3))
    radius, tall = half[:, None, :, 0], half[:, None, :, 2]
    square = dx * dx + dy * dy
    b = gx * dx + gy * dy
    root = b * b - square * (gx * gx + gy * gy - radius * radius)
    side = (-b - root.clamp(min=0).sqrt()) / square
    on_side = (root > 0) & (side > 0) & ((gz + side * dz).abs() < tall)
    cap = (torch.where(dz > 0, -tall, tall) - gz) / dz
    ex, ey = gx + cap * dx, gy + cap * dy
    on_cap = (cap > 0) & (ex * ex + ey * ey < radius * radius)
    return _nearest(torch.minimum(torch.where(on_side, side, FAR), torch.where(on_cap, cap, FAR)))


def meet_ellipsoids(
    origin: Tensor, rays: Rays, middle: Tensor, half: Tensor
) -> tuple[Tensor, Tensor]:
    a = b = c = None
    for i, d in enumerate((rays.dx, rays.dy, rays.dz)):
        inverse = 1 / half[..., i]
        to = ((origin[..., i : i + 1] - middle[..., i]) * inverse)[:, None]
        way = _per_ray(d) * inverse[:, None]
        a = way * way if a is None else a + way * way
        b = to * way if b is None else b + to * way
        c = to * to if c is None else c + to * to
    assert a is not None and b is not None and c is not None
    root = b * b - a * (c - 1)
    depth = (-b - root.clamp(min=0).sqrt()) / a
    return _nearest(torch.where((root > 0) & (depth > 0), depth, FAR))


def meet_solids(origin: Tensor, rays: Rays, solids: Solids) -> tuple[Tensor, Tensor]:
    """The depth of the first solid that rays [F, P] from eyes [F, 3] meet, and its number."""
    boxes, rounds = solids.boxes, solids.boxes + solids.cylinders
    families = (
        (meet_boxes, slice(0, boxes)),
        (meet_cylinders, slice(boxes, rounds)),
        (meet_ellipsoids, slice(rounds, None)),
    )
    depth = torch.full_like(rays.dx, FAR)
    number = torch.zeros_like(rays.dx, dtype=torch.long)
    for meet, part in families:
        middle, half = solids.middle[:, part], solids.half[:, part]
        if not middle.shape[1]:
            continue
        found, which = meet(origin, rays, middle, half)
        number = torch.where(found < depth, which + part.start, number)
        depth = torch.minimum(depth, found)
    return depth, number
