"""What a frame shows: surfaces, poses, colours, motion, told from pixels and the truth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

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


def surfaces_right(frames: Frames, scene: Scene, index: Sequence[int]) -> Tensor:
    """Whether each surface is what it should be: [F, 10], NaN where too little of it is in view.

    frames are those of numbers `index` of the scene. A surface (walls, floor, ceiling, objects) is
    right when its pixels, the light removed, have the named colours that the truth's have, by at
    least 60 % overlap of their shares, and when the pattern that fits it best is its own.
    """
    out = torch.full((len(index), OBJECTS + 4), math.nan)
    for row, (picture, i) in enumerate(zip(pictures(frames), index, strict=True)):
        now = scene.time[i : i + 1].float()
        out[row] = _read_surfaces(picture, scene.world.rooms, scene.pose[i : i + 1], now)
    return out


def _read_surfaces(picture: Tensor, rooms: Rooms, pose: Tensor, time: Tensor) -> Tensor:
    _, light, seen = atrium.cast(rooms, pose, time, SMALL, 1)
    surface, bright = seen[0, :, 0], light[0, :, 0].clamp(min=0.2)[:, None]
    truth = atrium.render(rooms, pose, time, SMALL)[0]
    small = F.interpolate(picture[None], size=(SMALL, SMALL), mode="area")[0]
    palette = torch.tensor(list(atrium.PALETTE.values()))
    bare, bare_truth = (x.flatten(1).T / bright for x in (small, truth))  # [P, 3]
    names, names_truth = (torch.cdist(x, palette).argmin(-1) for x in (bare, bare_truth))
    out = torch.full((OBJECTS + 4,), math.nan)
    masks = None
    for i in range(OBJECTS + 4):
        mine = surface == i
        if mine.float().mean() < (THING if i >= OBJECTS else REGION):
            continue
        shares = [
            x[mine].bincount(minlength=len(palette)) / mine.sum() for x in (names, names_truth)
        ]
        right = bool(torch.minimum(*shares).sum() >= 0.6)
        if right and i <= FLOOR and rooms.kind[0, i] > 0:
            if masks is None:
                masks = _pattern_masks(rooms, pose)
            first, second = palette[rooms.colour[0, i]]
            way = second - first
            mixed = ((bare[mine] - first) @ way / (way @ way)).clamp(0, 1)
            right = _pattern_right(mixed, masks[:, :, mine], int(rooms.kind[0, i]))
        out[i] = float(right)
    return out


def _pattern_masks(rooms: Rooms, pose: Tensor, phases: int = 8) -> Tensor:
    """Where each kind at each phase shows its second colour: [kinds, phases, P]."""
    kinds = len(atrium.KINDS)
    count = kinds * phases
    many = rooms.repeat(count)
    kind = torch.arange(kinds).repeat_interleave(phases)[:, None].expand(count, 6)
    phase = (torch.arange(phases) / phases).repeat(kinds)[:, None].expand(count, 6).clone()
    phase[:, FLOOR:] = 0
    dark, bright = atrium.COLOURS.index("black"), atrium.COLOURS.index("white")
    colour = torch.tensor([dark, bright]).expand(count, 6, 2)
    many = replace(many, kind=kind, phase=phase, colour=colour, thing=torch.zeros_like(many.thing))
    shown = atrium.cast(many, pose.expand(count, 3), torch.zeros(count), SMALL, 1)[0]
    masks: Tensor = (shown[0, :, :, 0] > 0.5).float().unflatten(0, (kinds, phases))
    return masks


def _pattern_right(mixed: Tensor, masks: Tensor, kind: int) -> bool:
    """Whether no other kind of pattern, at its best phase, fits clearly better than the true one.

    mixed [P] is how much of the second colour each pixel has, masks [kinds, phases, P].
    """
    errors = (masks - mixed).abs().mean(-1).amin(-1)  # [kinds]
    errors[0] = torch.minimum(errors[0], (1 - mixed).abs().mean())  # plain, in either colour
    return bool(errors[kind] <= errors.min() + 0.05)


def pose_errors(frames: Frames, scene: Scene, index: Sequence[int]) -> tuple[float, float]:
    """How far frames seem to be from their true poses: in sides of the room, and in degrees."""
    places, headings = [], []
    for picture, i in zip(pictures(frames), index, strict=True):
        true = scene.pose[i]
        near, now = true + ASTRAY, scene.time[i : i + 1].float()
        pose, _ = atrium.locate(picture, scene.world.rooms, near, now)
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
    rooms = scene.world.rooms
    unsaid = torch.cat([~rooms.said[0], torch.tensor([False, True]), ~rooms.told[0]])
    size = frames.shape[1]
    values = []
    for frame, i in zip(frames, index, strict=True):
        seen = atrium.see(rooms, scene.pose[i : i + 1], scene.time[i : i + 1].float(), size)[0]
        mask = unsaid[seen].numpy()
        if mask.mean() >= 0.1:
            error = np.square(frame[mask].astype(np.float64) - scene.frames[i][mask]).mean()
            values.append(min(100.0, 10 * math.log10(255**2 / max(error, 1e-6))))
    return mean(values)


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
