"""The camera of a world model: where it stands, moved by actions, and what its tokens look at."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tachyscope.models.atrium import world as atrium

START = (0.5, 0.5, 0.0)  # the middle of the room, facing the front wall
NEAR = atrium.NEAR


def at(starts: Sequence[Sequence[float]], pace: float, device: torch.device) -> Tensor:
    """A camera for each start (x, y, degrees): x, y, heading in steps of a turn, pace: [B, 4]."""
    rows = [[x, y, turned * atrium.TURN / 360 % atrium.TURN, pace] for x, y, turned in starts]
    return torch.tensor(rows, dtype=torch.float32, device=device)


def walk(camera: Tensor, actions: Tensor) -> Tensor:
    """The poses [B, F, 3] that actions [F] lead cameras [B, 4] to; the cameras then stand there.

    All of it is numbers of the device: launches recorded once go on walking.
    """
    poses = atrium.walk(camera[:, :3], actions.expand(len(camera), -1), camera[:, 3])
    camera[:, :3] = poses[:, -1]
    return poses


def matrices(poses: Tensor) -> Tensor:
    """Poses [..., 3] as camera-to-world matrices [..., 3, 4]: rotation about the upright, place.

    In float64, so that every device has the same.
    """
    x, y, heading = poses.double().unbind(-1)
    angle = heading * (2 * math.pi / atrium.TURN)
    cos, sin, none = angle.cos(), angle.sin(), torch.zeros_like(x)
    rows = (cos, -sin, none, x, sin, cos, none, y, none, none, none + 1, none)
    return torch.stack(rows, -1).unflatten(-1, (3, 4))


def rays(poses: Tensor, grid: tuple[int, int]) -> Tensor:
    """What every token of frames at poses [B, F, 3] looks at: [B, F * N, 8]."""
    return atrium.rays(poses, grid[0]).flatten(1, 2)
