"""What a frame shows: surfaces, poses, colours, motion, told from pixels and the truth."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tachyscope.measure.quality import Frames, Values, motion
from tachyscope.models.atrium import surfaces
from tachyscope.models.atrium import world as atrium
from tachyscope.models.atrium.surfaces import AT_ONCE, Surfaces, true_surfaces
from tachyscope.models.atrium.world import SIDES, TURN
from tachyscope_lab.evaluation import sightings
from tachyscope_lab.evaluation.intervals import mean
from tachyscope_lab.evaluation.scenes import Scene, pictures

# Where the search for a pose begins, off the truth: x, y, heading. From the truth itself it would
# find the truth too easily.
ASTRAY = torch.tensor([0.031, -0.023, 0.37])
STOPPED = 0.25  # of the truth's motion: a picture that moves less has stopped


def surfaces_right(frames: Frames, scene: Scene, index: Sequence[int]) -> Tensor:
    """Whether each surface is what it should be: [F, 10], NaN where too little of it is in view.

    frames are those of numbers `index` of the scene.
    """
    numbers = tuple(index)

    def work_out() -> Surfaces:
        pose, time = (x[list(numbers)].to(scene.device) for x in (scene.pose, scene.time.float()))
        return true_surfaces(scene.rooms, pose, time)

    truth = scene.once(("surfaces", numbers), work_out)
    return surfaces.surfaces_right(pictures(frames).to(scene.device), scene.rooms, truth)


def pose_errors(frames: Frames, scene: Scene, index: Sequence[int]) -> tuple[float, float]:
    """How far frames seem to be from their true poses: in sides of the room, and in degrees."""
    places, headings = [], []
    for picture, i in zip(pictures(frames).to(scene.device), index, strict=True):
        true = scene.pose[i]
        near, now = (x.to(scene.device) for x in (true + ASTRAY, scene.time[i : i + 1].float()))
        pose = sightings.locate(picture, scene.rooms, near, now)[0].cpu()
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
    views = sightings.in_view(rooms.repeat(len(at)), scene.pose[at], scene.time[at].float())
    unseen = sightings.in_view(rooms, scene.pose[:1], torch.zeros(1))[0] < (0.05 if hidden else 2.0)
    front = int(atrium.facing(scene.pose[:1])[0])
    walls = []
    for wall in range(4):
        if not (rooms.said[0, wall] and unseen[wall]):
            continue
        row = int((views[:, wall] >= 0.8 * views[:, wall].max()).int().argmax())
        picture, i = pictures(frames[row : row + 1]), index[row]
        time = scene.time[i : i + 1].float()
        shares = sightings.colour_shares(picture, rooms, scene.pose[i : i + 1], time, wall)[0]
        plain = int(rooms.kind[0, wall]) == 0
        named = shares[rooms.colour[0, wall, : 1 if plain else 2]]
        right = float(named.sum() >= 0.6 and named.min() >= 0.1)
        walls.append((SIDES[(wall - front) % 4], right))
    return walls
