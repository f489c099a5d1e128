"""What pictures of Atrium tell: which surfaces are in view, from where, and in which colours."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tachyscope.models.atrium.world import COLOURS, NEAR, OBJECTS, PALETTE, Rooms, cast, render, see


def in_view(rooms: Rooms, pose: Tensor, time: Tensor, size: int = 32) -> Tensor:
    """The share of the picture that each surface takes: [F, 10]."""
    seen = see(rooms, pose, time, size).flatten(1)
    return F.one_hot(seen, OBJECTS + 4).to(pose.dtype).mean(1)


def locate(
    frame: Tensor, rooms: Rooms, near: Tensor, time: Tensor, reach: float = 0.3
) -> tuple[Tensor, Tensor]:
    """The pose [3] whose picture is most like `frame` [3, S, S], and the mean square error there.

    Searched about the pose `near` [3], within `reach` of it and three steps of a turn, on grids
    five wide that narrow four times; headings may fall between the steps.
    """
    small = F.interpolate(frame[None], size=(32, 32), mode="area")
    best, error = near, torch.full((), math.inf)
    spread, angle = reach / 2, 1.5
    offsets = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0], device=near.device, dtype=near.dtype)
    for _ in range(4):
        grid = torch.cartesian_prod(offsets * spread, offsets * spread, offsets * angle)
        poses = best + grid
        poses[:, :2] = poses[:, :2].clamp(NEAR, 1 - NEAR)
        pictures = render(rooms.repeat(len(poses)), poses, time.expand(len(poses)), 32)
        errors = (pictures - small).square().mean((1, 2, 3))
        at = errors.argmin()
        best, error = poses[at], errors[at]
        spread, angle = spread / 2, angle / 2
    return best, error


def colour_shares(frames: Tensor, rooms: Rooms, pose: Tensor, time: Tensor, surface: int) -> Tensor:
    """How much of a surface's pixels [F, 8] is nearest to each named colour, its light removed.

    All zero where the surface is out of view.
    """
    size = frames.shape[-1]
    _, light, seen = cast(rooms, pose, time, size, 1)
    palette = torch.tensor(list(PALETTE.values()), device=frames.device, dtype=frames.dtype)
    bare = frames.flatten(2).transpose(1, 2) / light.to(frames.dtype)  # [F, P, 3]
    name = torch.cdist(bare, palette.expand(len(frames), -1, -1)).argmin(-1)
    mask = (seen[..., 0] == surface).to(frames.dtype)
    share = (F.one_hot(name, len(COLOURS)) * mask[..., None]).sum(1)
    return share / mask.sum(1, keepdim=True).clamp(min=1)
