"""The walker: poses (x, y, heading), moved by actions at a walking pace, stopped by walls."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from tachyscope.models.atrium.world import ACTIONS as ACTIONS
from tachyscope.models.atrium.world import letters as letters
from tachyscope_lab.worlds.lodge.plan import HEIGHT, INNER, MARGIN, OUTER, ROOMS, is_free, signs

TURN = 24  # steps of a full turn
STRIDE = 0.6
PACE = 0.25  # of a step that a frame takes: 15 cm or 3.75 degrees
EYE = 1.5
SLOPE = 0.8  # tangent of half the field of view


def direction(heading: Tensor) -> tuple[Tensor, Tensor]:
    angle = (heading % TURN) * (2 * math.pi / TURN)
    return angle.cos(), angle.sin()


def step(pose: Tensor, action: Tensor, pace: float | Tensor = PACE) -> Tensor:
    """The pose [..., 3] after an action [...]; a wall stops the walker only across itself."""
    x, y, heading = pose.unbind(-1)
    turned = pace * ((action == 5).to(pose) - (action == 6).to(pose))
    heading = (heading + turned) % TURN
    ahead = (action == 1).to(pose) - (action == 2).to(pose)
    aside = (action == 3).to(pose) - (action == 4).to(pose)
    cos, sin = direction(heading)
    to_x = x + pace * STRIDE * (ahead * cos - aside * sin)
    x = torch.where(is_free(to_x, y), to_x, x)
    to_y = y + pace * STRIDE * (ahead * sin + aside * cos)
    y = torch.where(is_free(x, to_y), to_y, y)
    return torch.stack([x, y, heading], -1)


def walk(start: Tensor, actions: Tensor, pace: float | Tensor = PACE) -> Tensor:
    """Poses [B, T, 3] from start [B, 3]; each action comes before the frame of its number."""
    poses = []
    for action in actions.unbind(1):
        start = step(start, action, pace)
        poses.append(start)
    return torch.stack(poses, 1)


def make_starts(count: int, generator: Generator) -> Tensor:
    """Random poses [B, 3] in any room, at multiples of the turn's step."""
    room = torch.randint(ROOMS, (count,), generator=generator)
    low, high = INNER + MARGIN, OUTER - MARGIN
    place = signs()[room] * (low + (high - low) * torch.rand(count, 2, generator=generator))
    heading = torch.randint(TURN, (count, 1), generator=generator)
    return torch.cat([place, heading.to(place)], 1)


def facing(pose: Tensor) -> Tensor:
    """The quarter that poses [..., 3] look to: 0 along x, then anticlockwise."""
    return ((pose[..., 2] + TURN // 8) // (TURN // 4) % 4).long()


def seen_from(pose: Tensor, front: Tensor) -> Tensor:
    """Poses [..., 3] in the house turned by quarters [...], so that `front` becomes 0."""
    cos, sin = _quarter(front)
    x, y, heading = pose.unbind(-1)
    turned = (heading - front.to(pose) * (TURN // 4)) % TURN
    return torch.stack([cos * x + sin * y, cos * y - sin * x, turned], -1)


def _quarter(front: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of quarter turns, exact."""
    table = torch.tensor([1.0, 0.0, -1.0, 0.0], device=front.device)
    return table[front % 4], table[(front + 3) % 4]


def rays(pose: Tensor, grid: int) -> Tensor:
    """What a grid's middles look at from poses [..., 3]: [..., grid², 8].

    Where the walker stands, the unit direction, and where it meets the outer walls; the house is 1
    wide, as the embedding of a camera expects.
    """
    at = ((torch.arange(grid, device=pose.device, dtype=pose.dtype) + 0.5) / grid * 2 - 1) * SLOPE
    up, right = torch.meshgrid(-at, at, indexing="ij")
    up, right = up.flatten(), right.flatten()
    cos, sin = (part[..., None] for part in direction(pose[..., 2]))
    way = torch.stack([cos + right * sin, sin - right * cos, up.expand_as(cos * up)], -1)
    way = F.normalize(way, dim=-1)
    place = pose[..., None, :2].expand(*way.shape[:-1], 2)
    eye = F.pad(place, (0, 1), value=EYE)
    ends = torch.where(
        way > 0, way.new_tensor([OUTER, OUTER, HEIGHT]), way.new_tensor([-OUTER, -OUTER, 0])
    )
    depth = ((ends - eye) / torch.where(way.abs() < 1e-9, 1e-9, way)).amin(-1, keepdim=True)
    wide = way.new_tensor([2 * OUTER, 2 * OUTER, 2 * OUTER])
    middle = way.new_tensor([0.5, 0.5, 0.0])
    met = (eye + depth * way) / wide + middle
    return torch.cat([place / (2 * OUTER) + 0.5, way, met], -1)
