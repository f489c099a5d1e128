"""Keys that move a camera: forward, back, left, right, and where it looks.

The camera is OpenCV's: x to the right, y down, z ahead. A latent frame's motion is its
camera-to-world matrix seen from the camera of the frame before it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

ACTIONS = ".wsadikjlqe"  # stay; move; look up, down, left, right; walk on and look left, right
# keys that are down; others of these letters are one key each
BOTH = {".": "", "q": "wj", "e": "wl"}
YAW, PITCH = 6.0, 2.0  # degrees a latent frame
WAY = 0.05  # of poses: what a latent frame's motion of length 1 is in the unit of attention=pose
# by key: right, down, ahead; degrees to look up, to the right
STEPS = {
    "w": (0, 0, 1, 0, 0),
    "s": (0, 0, -1, 0, 0),
    "a": (-1, 0, 0, 0, 0),
    "d": (1, 0, 0, 0, 0),
    "i": (0, 0, 0, PITCH, 0),
    "k": (0, 0, 0, -PITCH, 0),
    "j": (0, 0, 0, 0, -YAW),
    "l": (0, 0, 0, 0, YAW),
}
START = (0.0, 0.0, 0.0)
NEAR = 0.0


def pressed(action: str) -> str:
    """The keys that are down in an action."""
    return BOTH.get(action, action)


@functools.cache
def motions(device: torch.device) -> Tensor:
    """Each action's motion in a latent frame [A, 3, 4], in float64."""
    rows = []
    for action in ACTIONS:
        steps = [STEPS[key] for key in pressed(action)]
        x, y, z, pitch, yaw = (sum(part) for part in zip((0,) * 5, *steps, strict=True))
        up, side = math.radians(pitch), math.radians(yaw)
        # to the side about the upright, and up about the camera's own x
        turned = [
            [math.cos(side), math.sin(side) * math.sin(up), math.sin(side) * math.cos(up)],
            [0.0, math.cos(up), -math.sin(up)],
            [-math.sin(side), math.cos(side) * math.sin(up), math.cos(side) * math.cos(up)],
        ]
        rows.append([[*row, float(way)] for row, way in zip(turned, (x, y, z), strict=True)])
    return torch.tensor(rows, dtype=torch.float64, device=device)


def at(starts: Sequence[Sequence[float]], pace: float, device: torch.device) -> Tensor:
    """A camera for each start, at the origin: place, pace, rotation by rows: [B, 13]."""
    rest = [0.0, 0.0, 0.0, pace, *torch.eye(3).flatten().tolist()]
    return torch.tensor([rest] * len(starts), dtype=torch.float64, device=device)


def walk(camera: Tensor, actions: Tensor) -> Tensor:
    """The poses [B, F, 3, 4] that actions [F] lead cameras [B, 13] to; they then stand there.

    All of it is numbers of the device: launches recorded once go on walking.
    """
    place, turned = camera[:, :3].clone(), camera[:, 4:].unflatten(1, (3, 3)).clone()
    poses = []
    for motion in motions(camera.device)[actions].unbind(0):
        place = place + turned @ motion[:, 3]
        turned = turned @ motion[:, :3]
        poses.append(torch.cat([turned, place[:, :, None]], 2))
    camera[:, :3], camera[:, 4:] = place, turned.flatten(1)
    return torch.stack(poses, 1)


def matrices(poses: Tensor) -> Tensor:
    """Poses [..., 3, 4] with their places in the unit of attention=pose."""
    return torch.cat([poses[..., :3], WAY * poses[..., 3:]], -1)
