"""What a frame shows: surfaces, poses, colours, motion, told from pixels and the truth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tachyscope.evaluation.intervals import mean
from tachyscope.evaluation.scenes import Scene, pictures
from tachyscope.quality import Frames, Values, motion
from tachyscope.worlds import atrium
from tachyscope.worlds.atrium import FLOOR, OBJECTS, SIDES, TURN, Rooms

# Where the search for a pose begins, off the truth: x, y, heading. From the truth itself it would
# find the truth too easily.
ASTRAY = torch.tensor([0.031, -0.023, 0.37])
STOPPED = 0.25  # of the truth's motion: a picture that moves less has stopped
REGION, THING = 0.04, 0.01  # shares of the picture from which a surface, an object is judged
SMALL = 48  # pixels of the picture that surfaces are read from
AT_ONCE = 8  # frames whose truth is worked out together


@dataclass(frozen=True)
class Surfaces:
    """What some frames of a scene truly show, in P = SMALL x SMALL pixels."""

    seen: Tensor  # [F, P]: the surface that each pixel shows
    light: Tensor  # [F, P, 1]
    area: Tensor  # [F, 10]: the share of the picture that each surface takes
    shares: Tensor  # [F, 10, colours]: of a surface's pixels, by named colour
    masks: Tensor  # [F, kinds, phases, P]: where patterns would show their second colour


def surfaces_right(frames: Frames, scene: Scene, index: Sequence[int]) -> Tensor:
    """Whether each surface is what it should be: [F, 10], NaN where too little of it is in view.

    frames are those of numbers `index` of the scene. A surface (walls, floor, ceiling, objects) is
    right when its pixels, the light removed, have the named colours that the truth's have, by at
    least 60 % overlap of their shares, and when the pattern that fits it best is its own.
    """
    numbers, room = tuple(index), scene.rooms
    truth = scene.once(("surfaces", numbers), lambda: _true_surfaces(scene, numbers))
    small = F.interpolate(pictures(frames).to(scene.device), size=(SMALL, SMALL), mode="area")
    bare = small.flatten(2).mT / truth.light
    right = torch.minimum(_colour_shares(bare, truth), truth.shares).sum(-1) >= 0.6
    # of walls and floor with a pattern: no other kind, at its best phase, fits clearly better
    kind = room.kind[0, : FLOOR + 1]
    errors = _pattern_errors(bare, truth, room)
    own = errors.gather(1, kind.expand(len(errors), 1, -1))[:, 0]
    right[:, : FLOOR + 1] &= (own <= errors.amin(1) + 0.05) | (kind == 0)
    least = torch.full((OBJECTS + 4,), REGION, device=scene.device)
    least[OBJECTS:] = THING
    return right.float().masked_fill(truth.area < least, math.nan).cpu()


def _true_surfaces(scene: Scene, index: Sequence[int]) -> Surfaces:
    room, parts = scene.rooms, []
    pose, time = (x[list(index)].to(scene.device) for x in (scene.pose, scene.time.float()))
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


def _colour_shares(bare: Tensor, truth: Surfaces) -> Tensor:
    """How much of each surface is nearest to each named colour, from pixels [F, P, 3]."""
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
    """Where each kind at each phase shows its second colour, from poses [F, 3]."""
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
    """How far each kind of pattern, at its best phase, is from what walls and floor show.

    [F, kinds, 5], from pixels [F, P, 3] without light.
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


def pose_errors(frames: Frames, scene: Scene, index: Sequence[int]) -> tuple[float, float]:
    """How far frames seem to be from their true poses: in sides of the room, and in degrees."""
    places, headings = [], []
    for picture, i in zip(pictures(frames).to(scene.device), index, strict=True):
        true = scene.pose[i]
        near, now = (x.to(scene.device) for x in (true + ASTRAY, scene.time[i : i + 1].float()))
        pose = atrium.locate(picture, scene.rooms, near, now)[0].cpu()
        places.append(float((pose[:2] - true[:2]).norm()))
        headings.append(abs(float(pose[2] - true[2])) * 360 / TURN)
    return mean(places), mean(headings)


def stopped(frames: Frames, truth: Frames, before: Frames) -> float:
    """The share of frames that hardly move from the last though the truth does.

    before [H, W, 3] is the frame ahead of the first, in both.
    """
    return stopped_share(motion(frames, before), motion(truth, before))


def stopped_share(ours: Values, theirs: Values) -> float:
    """`stopped` of frames whose motion is known."""
    moves = theirs > 1.0
    return float((ours[moves] < STOPPED * theirs[moves]).mean()) if moves.any() else math.nan


def unsaid_db(frames: Frames, scene: Scene, index: Sequence[int]) -> float:
    """Mean PSNR over what the prompt leaves out: unnamed walls, unnamed objects, the ceiling."""
    numbers, size = tuple(index), frames.shape[1]
    masks = scene.once(("unsaid", numbers, size), lambda: _unsaid(scene, numbers, size))
    values = []
    for frame, mask, i in zip(frames, masks, index, strict=True):
        if mask.mean() >= 0.1:
            error = np.square(frame[mask].astype(np.float64) - scene.frames[i][mask]).mean()
            values.append(min(100.0, 10 * math.log10(255**2 / max(error, 1e-6))))
    return mean(values)


def _unsaid(scene: Scene, index: Sequence[int], size: int) -> np.ndarray:
    """Where frames show what the prompt leaves out: [F, size, size]."""
    room = scene.world.rooms
    unsaid = torch.cat([~room.said[0], torch.tensor([False, True]), ~room.told[0]])
    pose, time = (x[list(index)].to(scene.device) for x in (scene.pose, scene.time.float()))
    pieces = zip(pose.split(AT_ONCE), time.split(AT_ONCE), strict=True)
    seen = [atrium.see(scene.rooms.repeat(len(when)), where, when, size) for where, when in pieces]
    return unsaid[torch.cat(seen).cpu()].numpy()


def prompt_right(frames: Frames, scene: Scene, index: Sequence[int]) -> float:
    """Of the walls that the prompt names and the first frame hides, how many come out as named."""
    return mean(right for _, right in named_walls(frames, scene, index))


def named_walls(
    frames: Frames, scene: Scene, index: Sequence[int], hidden: bool = True
) -> list[tuple[str, float]]:
    """Walls that the prompt names and the first frame hides: their side, 1 where they are right.

    With hidden False, all that it names. Judged at the frame, of numbers `index`, that first shows
    four fifths of the most seen of it.
    """
    rooms = scene.world.rooms
    at = torch.tensor(list(index))
    views = atrium.in_view(rooms.repeat(len(at)), scene.pose[at], scene.time[at].float())
    unseen = atrium.in_view(rooms, scene.pose[:1], torch.zeros(1))[0] < (0.05 if hidden else 2.0)
    front = int(atrium.facing(scene.pose[:1])[0])
    walls = []
    for wall in range(4):
        if not (rooms.said[0, wall] and unseen[wall]):
            continue
        row = int((views[:, wall] >= 0.8 * views[:, wall].max()).int().argmax())
        picture, i = pictures(frames[row : row + 1]), index[row]
        time = scene.time[i : i + 1].float()
        shares = atrium.colour_shares(picture, rooms, scene.pose[i : i + 1], time, wall)[0]
        plain = int(rooms.kind[0, wall]) == 0
        named = shares[rooms.colour[0, wall, : 1 if plain else 2]]
        right = float(named.sum() >= 0.6 and named.min() >= 0.1)
        walls.append((SIDES[(wall - front) % 4], right))
    return walls
