"""Atrium's camera: moved by actions, its poses as matrices and rays of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tachyscope.models.atrium import world as atrium

START = (0.5, 0.5, 0.0)  # the middle of the room, facing the front wall
NEAR = atrium.NEAR


def at(starts: Sequence[Sequence[float]], pace: float, device: torch.device) -> Tensor:
    """Cameras at starts (x, y, degrees): x, y, heading in steps of a turn, pace: [B, 4]."""
    rows = [[x, y, turned * atrium.TURN / 360 % atrium.TURN, pace] for x, y, turned in starts]
    return torch.tensor(rows, dtype=torch.float32, device=device)


def walk(camera: Tensor, actions: Tensor) -> Tensor:
    """The poses [B, F, 3] after each of actions [F]; cameras [B, 4] are updated in place.

    Everything is computed on the device, so that a CUDA graph moves the cameras on.
    """
    poses = atrium.walk(camera[:, :3], actions.expand(len(camera), -1), camera[:, 3])
    camera[:, :3] = poses[:, -1]
    return poses


def matrices(poses: Tensor) -> Tensor:
    """Poses [..., 3] as camera-to-world matrices [..., 3, 4], rotated about the vertical.

    In float64, so that every device has the same values.
    """
    x, y, heading = poses.double().unbind(-1)
    angle = heading * (2 * math.pi / atrium.TURN)
    cos, sin, none = angle.cos(), angle.sin(), torch.zeros_like(x)
    rows = (cos, -sin, none, x, sin, cos, none, y, none, none, none + 1, none)
    return torch.stack(rows, -1).unflatten(-1, (3, 4))


def rays(poses: Tensor, grid: tuple[int, int]) -> Tensor:
    """The ray of each token of frames at poses [B, F, 3]: [B, F * N, 8]."""
    return atrium.rays(poses, grid[0]).flatten(1, 2)
