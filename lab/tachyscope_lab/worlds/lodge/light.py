"""How light falls: through windows, from the sun and from lamps, less in corners, under things."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tachyscope_lab.worlds.lodge.casting import FAR
from tachyscope_lab.worlds.lodge.furniture import Solids
from tachyscope_lab.worlds.lodge.houses import Houses
from tachyscope_lab.worlds.lodge.plan import (
    HEIGHT,
    INNER,
    MIDDLE,
    OUTER,
    SILL,
    TOP,
    WINDOW,
    signs,
)

# of morning, noon, evening and a grey day: the sun's height in degrees and its light, the light of
# the sky that comes in, the light from everywhere, and that of lamps
SUN_HEIGHT = (30.0, 48.0, 20.0, 40.0)
SUN = ((5.2, 4.5, 3.3), (6.2, 5.8, 5.0), (6.0, 3.4, 1.5), (0.0, 0.0, 0.0))
SKY = ((2.7, 3.1, 3.6), (3.5, 3.7, 3.9), (2.6, 2.2, 2.1), (3.1, 3.3, 3.5))
AROUND = ((0.40, 0.42, 0.46), (0.50, 0.51, 0.52), (0.34, 0.31, 0.32), (0.44, 0.46, 0.48))
LAMP = ((0.5, 0.4, 0.28), (0.3, 0.25, 0.18), (1.9, 1.35, 0.75), (0.9, 0.7, 0.45))
CORNER, REACH = 0.5, 0.4  # how dark corners become, and how far from them
BAR = 0.035  # half the width of a window's bars


@dataclass(frozen=True)
class Points:
    """Places [F, P] on surfaces and their normals, mirrored so that they lie where x, y > 0."""

    x: Tensor
    y: Tensor
    z: Tensor
    nx: Tensor
    ny: Tensor
    nz: Tensor
    room: Tensor


@dataclass(frozen=True)
class Daylight:
    """The light of F frames' time of day, each [F, 3]."""

    sun: Tensor
    sky: Tensor
    around: Tensor
    lamp: Tensor
    to_sun: Tensor


def daylight(houses: Houses) -> Daylight:
    device, mood = houses.mood.device, houses.mood
    sun, sky, around, lamp = (
        torch.tensor(t, device=device)[mood] for t in (SUN, SKY, AROUND, LAMP)
    )
    height = torch.tensor(SUN_HEIGHT, device=device)[mood] * (math.pi / 180)
    flat = height.cos()
    to_sun = torch.stack([flat * houses.sun.cos(), flat * houses.sun.sin(), height.sin()], -1)
    return Daylight(sun, sky, around, lamp, to_sun)


def _soft(x: Tensor, soft: Tensor) -> Tensor:
    """0 below, 1 above, smooth over `soft` about 0."""
    s = (x / soft + 0.5).clamp(0, 1)
    return s * s * (3 - 2 * s)


def through_windows(
    at: Points, way: tuple[Tensor, Tensor, Tensor], window: Tensor, spread: float
) -> Tensor:
    """How much of what comes from directions `way` (mirrored as the points are) comes in.

    window is whether each of the two outer walls of the point's room has one: [F, P, 2].
    """
    total = torch.zeros_like(at.x)
    sides = ((at.x, at.y, way[0], way[1]), (at.y, at.x, way[1], way[0]))
    for number, (across, along, d, e) in enumerate(sides):
        far = (OUTER - across) / d.clamp(min=1e-3)
        met, height = along + far * e - MIDDLE, at.z + far * way[2]
        soft = 0.02 + spread * far
        middle = (SILL + TOP) / 2
        shown = _soft(WINDOW - met.abs(), soft) * _soft(
            (TOP - SILL) / 2 - (height - middle).abs(), soft
        )
        bars = _soft(BAR - met.abs(), soft) + _soft(BAR - (height - middle).abs(), soft)
        # where bars are thinner than the softness they take only their share
        bars = bars * (2 * BAR / soft).clamp(max=1)
        total = total + window[..., number] * (d > 1e-3) * shown * (1 - bars.clamp(0, 1))
    return total


def corners(at: Points) -> Tensor:
    """The share of the light from everywhere that corners leave: [F, P]."""
    left = torch.ones_like(at.x)
    planes = (
        (at.nx, at.x - INNER), (at.nx, OUTER - at.x), (at.ny, at.y - INNER),
        (at.ny, OUTER - at.y), (at.nz, at.z), (at.nz, HEIGHT - at.z),
    )  # fmt: skip
    for normal, far in planes:
        near = torch.exp(-far.clamp(min=0) / REACH)
        left = left * (1 - CORNER * (1 - normal.abs()) * near)
    return left


def footprints(solids: Solids) -> tuple[Tensor, Tensor, Tensor]:
    """What stands on the floor of F frames: low and high corners [F, 24, 2], and how low it is."""
    low, high = solids.middle - solids.half, solids.middle + solids.half
    owners = torch.tensor([*range(16), *range(20, 28)], device=low.device)[:, None]
    standing = (low[..., 2] < 0.6) & (low[..., 2] > -1)
    own = (solids.owner == owners) & standing[:, None]  # [F, 24, N]
    corner = torch.where(own[..., None], low[:, None], FAR).amin(2)
    other = torch.where(own[..., None], high[:, None], -FAR).amax(2)
    return corner[..., :2], other[..., :2], corner[..., 2]


def under_things(x: Tensor, y: Tensor, prints: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The share of light that what stands on the floor leaves at places [F, P] of it."""
    low, high, height = (p[:, None] for p in prints)
    middle, half = (low + high) / 2, (high - low) / 2
    # the shadow of what moves is round: that of a smaller print
    half = torch.cat([half[:, :, :16], 0.4 * half[:, :, 16:]], 2)
    far_x = ((x[..., None] - middle[..., 0]).abs() - half[..., 0]).clamp(min=0)
    far_y = ((y[..., None] - middle[..., 1]).abs() - half[..., 1]).clamp(min=0)
    far = torch.hypot(far_x, far_y)
    shade = 0.65 * torch.exp(-far / 0.13) + 0.25 * torch.exp(-far / 0.5)
    shade = torch.where(half[..., 0] > 0, shade * torch.exp(-height.clamp(max=9) / 0.35), 0.0)
    return 1 - shade.amax(-1).clamp(max=0.85)


def in_shadow(place: tuple[Tensor, ...], to_sun: Tensor, solids: Solids) -> Tensor:
    """Whether something stands between places [F, P] and the sun [F, 3]; cylinders as boxes."""
    count = solids.boxes + solids.cylinders
    middle, half = solids.middle[:, None, :count], solids.half[:, None, :count]
    enter = leave = None
    for i, p in enumerate(place):
        inverse = 1 / torch.where(to_sun[:, i].abs() < 1e-4, 1e-4, to_sun[:, i])[:, None, None]
        to = (middle[..., i] - p[..., None]) * inverse
        wide = half[..., i] * inverse.abs()
        enter = to - wide if enter is None else torch.maximum(enter, to - wide)
        leave = to + wide if leave is None else torch.minimum(leave, to + wide)
    assert enter is not None and leave is not None
    boxed = ((enter < leave) & (enter > 0.005)).any(-1)
    middle, half = solids.middle[:, None, count:], solids.half[:, None, count:]
    a = b = c = None
    for i, p in enumerate(place):
        to = (p[..., None] - middle[..., i]) / half[..., i]
        way = to_sun[:, i, None, None] / half[..., i]
        a = way * way if a is None else a + way * way
        b = to * way if b is None else b + to * way
        c = to * to if c is None else c + to * to
    assert a is not None and b is not None and c is not None
    return boxed | ((b * b > a * (c - 1)) & (b < 0) & (c > 1.02)).any(-1)


def diffuse(at: Points, light: Daylight, window: Tensor, bounce: Tensor) -> Tensor:
    """The light [3, F, P] from sky and lamps and everywhere; bounce the rooms' tint [F, P, 3]."""
    left = corners(at)
    up = 0.82 + 0.18 * at.nz
    sky = torch.zeros_like(at.x)
    area = 4 * WINDOW * (TOP - SILL) / 2
    for number, (across, along) in enumerate(((at.x, at.y), (at.y, at.x))):
        to, aside, above = OUTER - across, MIDDLE - along, (SILL + TOP) / 2 - at.z
        square = to * to + aside * aside + above * above
        n, m = (at.nx, at.ny) if number == 0 else (at.ny, at.nx)
        facing = (to * n + aside * m + above * at.nz) * torch.rsqrt(square + 0.01)
        facing = (0.8 * facing + 0.2).clamp(min=0)
        seen = to.clamp(min=0) * torch.rsqrt(square + 0.01) + 0.08
        sky = sky + window[..., number] * area * seen * facing / (math.pi * square + area)
    dx, dy, dz = MIDDLE - at.x, MIDDLE - at.y, HEIGHT - 0.42 - at.z
    square = dx * dx + dy * dy + dz * dz
    facing = ((dx * at.nx + dy * at.ny + dz * at.nz) * torch.rsqrt(square + 0.01)).clamp(min=-0.2)
    lamp = (0.83 * facing + 0.17) / (square + 0.5)
    parts = []
    for c in range(3):
        around = light.around[:, c, None] * bounce[..., c] * left * up
        come = light.sky[:, c, None] * sky * (0.55 + 0.45 * left)
        parts.append(around + come + light.lamp[:, c, None] * lamp * (0.4 + 0.6 * left))
    return torch.stack(parts)


def mirrored(x: Tensor, y: Tensor, room: Tensor) -> tuple[Tensor, Tensor]:
    """Components [F, P] of directions as they are in the mirrored room."""
    side = signs(x.device)[room]
    return x * side[..., 0], y * side[..., 1]
