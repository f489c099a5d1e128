"""Random walks through Atrium's rooms to learn from, and how near pictures come to the truth."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.models.atrium.prompts import descriptions
from tachyscope.models.atrium.world import (
    ACTIONS,
    SIZE,
    TURN,
    Rooms,
    facing,
    make_rooms,
    make_starts,
    render,
    walk,
)

CAMERAS = ("still", "forward", "reversing", "walk")
BACK = dict(zip(ACTIONS, ".swdaeq", strict=True))  # what takes an action back


@dataclass(frozen=True)
class Clips:
    """Walks through rooms: `scene` [B, T] says which row of `rooms` each frame shows."""

    rooms: Rooms
    scene: Tensor  # [B, T]
    actions: Tensor  # [B, T]; the first of a scene is "stay"
    pose: Tensor  # [B, T, 3] x, y and heading in steps of a turn
    time: Tensor  # [B, T] steps by which things have moved on

    def to(self, device: torch.device | str) -> Clips:
        parts = (self.scene, self.actions, self.pose, self.time)
        return Clips(self.rooms.to(device), *(part.to(device) for part in parts))

    def prompt(self, row: int, frame: int = 0) -> str:
        """What is said of the scene shown at `frame`, seen from where that scene begins."""
        scene = self.scene[row]
        first = int((scene == scene[frame]).int().argmax())
        return descriptions(self.rooms, int(scene[frame]))[int(facing(self.pose[row, first]))]


def degrees(angle: float) -> float:
    """The pace at which a frame turns by an angle in degrees."""
    return angle * TURN / 360


def wander(count: int, frames: int, generator: Generator, still: float = 0.0) -> Tensor:
    """Actions [B, T] that last: long turns (a quarter of them full), short walks, rests.

    A share `still` of the rows never moves.
    """
    weights = torch.tensor([1.0, 2.0, 1.0, 0.7, 0.7, 2.0, 2.0])
    last = torch.tensor([0.7, 0.7, 0.7, 0.7, 0.7, 0.94, 0.94])
    drawn = torch.multinomial(weights, count * frames, True, generator=generator)
    drawn = drawn.view(count, frames)
    # after a turn, the turn back comes often: what was left is seen again
    back = torch.rand(count, frames, generator=generator) < 0.3
    go_on = torch.rand(count, frames, generator=generator)
    rows = [drawn[:, 0]]
    for t in range(1, frames):
        before = rows[-1]
        new = torch.where(back[:, t] & (before > 4), 11 - before, drawn[:, t])
        rows.append(torch.where(go_on[:, t] < last[before], before, new))
    actions = torch.stack(rows, 1)
    actions[torch.rand(count, generator=generator) < still] = 0
    return actions


def camera(kind: str, frames: int, generator: Generator) -> str:
    """Letters of a random clip of a kind among CAMERAS; the first is "stay".

    forward: a turn that goes on. reversing: a turn away and back again, and past the start where
    there is time. walk: steps, now and then a short turn.
    """

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    turn = "qe"[number(0, 1)]
    if kind == "still":
        return "." * frames
    if kind == "forward":
        return "." + turn * (frames - 1)
    if kind == "reversing":
        away = number(max(frames // 5, 1), max(frames // 2, 1))
        return ("." + turn * away + BACK[turn] * frames)[:frames]
    if kind != "walk":
        raise TachyscopeError(f"a camera is one of {', '.join(CAMERAS)}, got {kind!r}: use these")
    letters = "."
    while len(letters) < frames:
        letters += "wwwwsad"[number(0, 6)] * number(3, 10)
        letters += "qe"[number(0, 1)] * number(2, 5) * number(0, 1)
    return letters[:frames]


def make_clips(
    count: int,
    frames: int,
    generator: Generator,
    still: float = 0.0,
    motion: float = 1.0,
    cuts: float = 0.0,
    pace: float | Tensor = 1.0,
    tempo: float | Tensor = 1.0,
) -> Clips:
    """Random walks through random rooms.

    A share `still` of them has a resting camera; a share `cuts` has one cut to another room, with
    a prompt of its own. pace, tempo: one for all, or each clip's own [B].
    """
    rooms = make_rooms(2 * count, generator, motion)
    actions = wander(count, frames, generator, still)
    starts = make_starts(2 * count, generator)
    cut = torch.randint(1, max(frames, 2), (count, 1), generator=generator)
    cut[torch.rand(count, generator=generator) >= cuts] = frames
    late = torch.arange(frames) >= cut
    scene = torch.arange(count)[:, None] + count * late
    actions[:, 0] = 0
    actions = torch.where(torch.arange(frames) == cut, 0, actions)
    before = walk(starts[:count], actions, pace)
    # the second room's walk stands at its start until the cut
    after = walk(starts[count:], torch.where(late, actions, 0), pace)
    pose = torch.where(late[..., None], after, before)
    time = torch.as_tensor(tempo).reshape(-1, 1) * torch.arange(frames).expand(count, frames)
    return Clips(rooms, scene, actions, pose, time)


def film(clips: Clips, size: int = SIZE, samples: int = 2, batch: int = 16) -> Tensor:
    """Every frame of clips: [B, T, 3, size, size], `batch` frames at a time."""
    scene, pose, time = clips.scene.flatten(), clips.pose.flatten(0, 1), clips.time.flatten()
    parts = [
        render(clips.rooms.rows(s), p, t, size, samples)
        for s, p, t in zip(scene.split(batch), pose.split(batch), time.split(batch), strict=True)
    ]
    return torch.cat(parts).unflatten(0, clips.scene.shape)


def sharpness(frames: Tensor) -> Tensor:
    """The root mean square of what a 3 by 3 mean takes away, of each frame [F, 3, S, S]: [F]."""
    return (
        (frames - F.avg_pool2d(frames, 3, 1, 1, count_include_pad=False))
        .square()
        .mean((1, 2, 3))
        .sqrt()
    )


def psnr(frames: Tensor, truth: Tensor) -> Tensor:
    """Peak signal to noise ratio in dB of pictures [..., 3, S, S] in 0..1: [...]."""
    return -10 * (frames - truth).square().mean((-3, -2, -1)).clamp(min=1e-10).log10()
