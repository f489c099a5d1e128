"""A camera moved by keys: forward, back, left, right, and where it looks.

Its axes are OpenCV's: x to the right, y down, z ahead. The motion of a latent frame is its
camera-to-world matrix in the coordinates of the camera of the frame before.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

ACTIONS = ".wsadikjlqe"  # stay; move; look up, down, left, right; walk on and look left, right
# actions that press no key or two; every other letter is a key
BOTH = {".": "", "q": "wj", "e": "wl"}
YAW, PITCH = 6.0, 2.0  # degrees a latent frame
UNIT = 0.05  # length of a latent frame's step in the unit of attention=pose
# of each key: steps to the right, down and ahead; degrees up and to the right
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
    """The keys that an action presses."""
    return BOTH.get(action, action)


@functools.cache
def motions(device: torch.device) -> Tensor:
    """The motion [3, 4] of each action in a latent frame: [A, 3, 4] in float64."""
    rows = []
    for action in ACTIONS:
        steps = [STEPS[key] for key in pressed(action)]
        x, y, z, pitch, yaw = (sum(part) for part in zip((0,) * 5, *steps, strict=True))
        up, side = math.radians(pitch), math.radians(yaw)
        # yaw about the vertical, then pitch about the camera's own x axis
        rotation = [
            [math.cos(side), math.sin(side) * math.sin(up), math.sin(side) * math.cos(up)],
            [0.0, math.cos(up), -math.sin(up)],
            [-math.sin(side), math.cos(side) * math.sin(up), math.cos(side) * math.cos(up)],
        ]
        rows.append([[*row, float(way)] for row, way in zip(rotation, (x, y, z), strict=True)])
    return torch.tensor(rows, dtype=torch.float64, device=device)


def at(starts: Sequence[Sequence[float]], pace: float, device: torch.device) -> Tensor:
    """Cameras at the origin, one for each start: position, pace, rotation by rows: [B, 13]."""
    rest = [0.0, 0.0, 0.0, pace, *torch.eye(3).flatten().tolist()]
    return torch.tensor([rest] * len(starts), dtype=torch.float64, device=device)


def walk(camera: Tensor, actions: Tensor) -> Tensor:
    """The poses [B, F, 3, 4] after each of actions [F]; cameras [B, 13] are updated in place.

    Everything is computed on the device, so that a CUDA graph moves the cameras on.
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
    """Poses [..., 3, 4] with positions in the unit of attention=pose."""
    return torch.cat([poses[..., :3], UNIT * poses[..., 3:]], -1)
