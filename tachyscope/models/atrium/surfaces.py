"""Compare the surfaces of a room in frames with the ground truth."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tachyscope.models.atrium import world as atrium
from tachyscope.models.atrium.world import FLOOR, OBJECTS, Rooms

REGION, THING = 0.04, 0.01  # least share of the frame at which a surface, an object is judged
SMALL = 48  # side in pixels at which surfaces are compared
AT_ONCE = 8  # frames of truth that are rendered together


@dataclass(frozen=True)
class Surfaces:
    """The ground truth of a room's frames, in P = SMALL x SMALL pixels."""

    seen: Tensor  # [F, P]: the surface that each pixel shows
    light: Tensor  # [F, P, 1]
    area: Tensor  # [F, 10]: each surface's share of the frame
    shares: Tensor  # [F, 10, colours]: share of a surface's pixels with each named colour
    masks: Tensor  # [F, kinds, phases, P]: where a pattern has its second colour


def true_surfaces(room: Rooms, pose: Tensor, time: Tensor) -> Surfaces:
    """The ground truth of a room (one row) at poses [F, 3] and times [F]."""
    parts = []
    for where, when in zip(pose.split(AT_ONCE), time.split(AT_ONCE), strict=True):
        rooms = room.repeat(len(when))
        _, light, seen = atrium.cast(rooms, where, when, SMALL, 1)
        picture = atrium.render(rooms, where, when, SMALL)
        masks = _pattern_masks(room, where)
        parts.append((picture, light.clamp(min=0.2), seen[..., 0], masks))
    picture, light, seen, masks = (torch.cat(x) for x in zip(*parts, strict=True))
    area = F.one_hot(seen, OBJECTS + 4).float().mean(1)
    truth = Surfaces(seen, light, area, area, masks)
    return replace(truth, shares=_colour_shares(picture.flatten(2).mT / light, truth))


def surfaces_right(pictures: Tensor, room: Rooms, truth: Surfaces) -> Tensor:
    """Whether each surface is as in the truth: [F, 10], NaN if too little of it is in view.

    pictures are [F, 3, S, S] in 0..1. A surface (walls, floor, ceiling, objects) is right when its
    pixels, the light removed, have the named colours that the truth's have, by at least 60 %
    overlap of their shares, and when the pattern that fits it best is its own.
    """
    small = F.interpolate(pictures, size=(SMALL, SMALL), mode="area")
    bare = small.flatten(2).mT / truth.light
    right = torch.minimum(_colour_shares(bare, truth), truth.shares).sum(-1) >= 0.6
    # of walls and floor with a pattern: no other kind, at its best phase, fits clearly better
    kind = room.kind[0, : FLOOR + 1]
    errors = _pattern_errors(bare, truth, room)
    own = errors.gather(1, kind.expand(len(errors), 1, -1))[:, 0]
    right[:, : FLOOR + 1] &= (own <= errors.amin(1) + 0.05) | (kind == 0)
    least = torch.full((OBJECTS + 4,), REGION, device=pictures.device)
    least[OBJECTS:] = THING
    return right.float().masked_fill(truth.area < least, math.nan).cpu()


def _colour_shares(bare: Tensor, truth: Surfaces) -> Tensor:
    """The share of each surface's pixels nearest to each named colour, for pixels [F, P, 3]."""
    palette = _palette(bare)
    name = torch.cdist(bare, palette.expand(len(bare), -1, -1)).argmin(-1)
    cell = truth.seen * len(palette) + name
    count = torch.zeros(len(bare), (OBJECTS + 4) * len(palette), device=bare.device)
    count.scatter_add_(1, cell, torch.ones_like(cell, dtype=count.dtype))
    count = count.view(len(bare), OBJECTS + 4, len(palette))
    return count / count.sum(-1, keepdim=True).clamp(min=1)


def _palette(like: Tensor) -> Tensor:
    return torch.tensor(list(atrium.PALETTE.values()), device=like.device, dtype=like.dtype)


def _pattern_masks(room: Rooms, pose: Tensor, phases: int = 8) -> Tensor:
    """Where each pattern at each phase has its second colour, at poses [F, 3]."""
    kinds = len(atrium.KINDS)
    count, device = kinds * phases * len(pose), pose.device
    many = room.repeat(count)
    kind = torch.arange(kinds, device=device).repeat_interleave(phases).repeat(len(pose))
    phase = (torch.arange(phases, device=device) / phases).repeat(kinds * len(pose))
    phase = phase[:, None].expand(count, 6).clone()
    phase[:, FLOOR:] = 0
    dark, bright = atrium.COLOURS.index("black"), atrium.COLOURS.index("white")
    colour = torch.tensor([dark, bright], device=device).expand(count, 6, 2)
    many = replace(
        many, kind=kind[:, None].expand(count, 6), phase=phase, colour=colour,
        thing=torch.zeros_like(many.thing),
    )  # fmt: skip
    poses, time = pose.repeat_interleave(kinds * phases, 0), torch.zeros(count, device=device)
    shown = atrium.cast(many, poses, time, SMALL, 1)[0]
    masks: Tensor = (shown[0, :, :, 0] > 0.5).unflatten(0, (len(pose), kinds, phases))
    return masks


def _pattern_errors(bare: Tensor, truth: Surfaces, room: Rooms) -> Tensor:
    """The error [F, kinds, 5] of each pattern at its best phase, for walls and floor.

    Pixels [F, P, 3] are without light.
    """
    first, second = _palette(bare)[room.colour[0, : FLOOR + 1]].unbind(1)
    way = second - first
    way = way / way.square().sum(-1, keepdim=True).clamp(min=1e-9)
    seen = truth.seen.clamp(max=FLOOR)
    # how much of its surface's second colour each pixel has
    mixed = ((bare - first[seen]) * way[seen]).sum(-1).clamp(0, 1)
    members = F.one_hot(truth.seen, OBJECTS + 4)[..., : FLOOR + 1].to(bare.dtype)
    count = members.sum(1, keepdim=True).clamp(min=1)
    errors = (truth.masks.to(bare.dtype) - mixed[:, None, None]).abs().flatten(1, 2) @ members
    errors = (errors / count).view(*truth.masks.shape[:3], FLOOR + 1).amin(2)
    inverse = ((1 - mixed)[:, None] @ members / count)[:, 0]
    errors[:, 0] = torch.minimum(errors[:, 0], inverse)  # plain, in either colour
    return errors
