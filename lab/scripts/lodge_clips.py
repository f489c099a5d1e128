"""Random walks through Lodge's houses to learn from: about a room, and from room to room."""

from __future__ import annotations

import math

import torch
from atrium_clips import Clips, wander
from torch import Generator, Tensor

from tachyscope_lab.worlds.lodge import camera
from tachyscope_lab.worlds.lodge.houses import make_houses
from tachyscope_lab.worlds.lodge.plan import MIDDLE, room_of

PACES = (0.25, 0.5, 1.0)  # of a step that a frame takes
SHARES = (0.5, 0.25, 0.25)
TOURS = 0.6  # clips that go from room to room
NEXT = (1, 3, 0, 2)  # the room after each, around the house
BEFORE = (2, 0, 3, 1)
ARRIVED = 0.5  # metres


def tour(start: Tensor, steps: int, generator: Generator) -> Tensor:
    """Actions [B, steps] that lead around the house by its doorways, with looks aside."""
    count = len(start)
    onward = torch.rand(count, generator=generator) < 0.5
    after, before = torch.tensor(NEXT), torch.tensor(BEFORE)
    side = MIDDLE * torch.tensor([[-1.0, -1.0], [1.0, -1.0], [-1.0, 1.0], [1.0, 1.0]])
    pose, looks = start, torch.zeros(count, dtype=torch.long)
    look = torch.zeros(count, dtype=torch.long)
    room = room_of(start[:, 0], start[:, 1])
    to_door = torch.rand(count, generator=generator) < 0.5
    actions = []
    for _ in range(steps):
        follows = torch.where(onward, after[room], before[room])
        # a doorway lies half way between two rooms' middles
        target = torch.where(to_door[:, None], (side[room] + side[follows]) / 2, side[room])
        way = target - pose[:, :2]
        here = way.norm(dim=1) < ARRIVED
        room = torch.where(here & to_door, follows, room)
        to_door = to_door ^ here
        want = torch.atan2(way[:, 1], way[:, 0]) * camera.TURN / (2 * math.pi)
        half = camera.TURN / 2
        off = (want - pose[:, 2] + half) % camera.TURN - half
        action = torch.where(off > 0.5, 5, torch.where(off < -0.5, 6, 1))
        begins = (torch.rand(count, generator=generator) < 0.03) & (looks == 0)
        number = torch.randint(2, camera.TURN // 2, (count,), generator=generator)
        looks = torch.where(begins, number, looks)
        look = torch.where(begins, torch.randint(5, 7, (count,), generator=generator), look)
        action = torch.where(looks > 0, look, action)
        looks = (looks - 1).clamp(min=0)
        pose = camera.step(pose, action, 1.0)
        actions.append(action)
    return torch.stack(actions, 1)


def make_clips(count: int, frames: int, generator: Generator) -> Clips:
    """Walks at paces of their own, a step's action held for as many frames as it takes."""
    which = torch.multinomial(torch.tensor(SHARES), count, True, generator=generator)
    pace = torch.tensor(PACES)[which]
    start = camera.make_starts(count, generator)
    steps = torch.where(
        torch.rand(count, 1, generator=generator) < TOURS,
        tour(start, frames, generator), wander(count, frames, generator, still=0.05),
    )  # fmt: skip
    frame = torch.arange(frames)
    # the first frame is the start, by an action that stays
    held = ((frame - 1).clamp(min=0) * pace[:, None]).long()
    actions = steps.gather(1, held)
    actions[:, 0] = 0
    pose = camera.walk(start, actions, pace)
    scene = torch.arange(count)[:, None].expand(count, frames)
    return Clips(make_houses(count, generator), scene, actions, pose, pace[:, None] * frame)
