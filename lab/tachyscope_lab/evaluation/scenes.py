"""Walks through unseen worlds, with the truth at every frame."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.limits import check
from tachyscope.measure.quality import Frames
from tachyscope.models.atrium import visit
from tachyscope.models.atrium import world as atrium
from tachyscope.models.atrium.visit import World
from tachyscope.models.atrium.world import STRIDE
from tachyscope.models.base import VideoModel

T = TypeVar("T")

CPU = torch.device("cpu")
WORLDS_A_SEED = 1_000
MOVED = 0.9 * STRIDE  # from every place of the given frames; a stride, rounded, may be less


def make_world(seed: int, number: int, motion: float = 1.0) -> World:
    """World `number` of an evaluation's seed: unseen room 1000 seed + number."""
    if not (0 <= seed < 1_000 and 0 <= number < WORLDS_A_SEED):
        raise TachyscopeError(f"seed and world must be from 0 to 999, got {seed} and {number}")
    return visit.make_world(WORLDS_A_SEED * seed + number, motion)


@dataclass(frozen=True)
class Scene:
    """A walk through a world: its actions, and the truth at every frame."""

    world: World
    actions: str  # letters, one a frame; the first is "stay"
    pose: Tensor  # [T, 3]
    frames: Frames  # [T, 128, 128, 3]
    pace: float = 1.0  # of a step that a frame takes
    device: torch.device = CPU  # what is worked out of the truth is worked out here
    _known: dict[Hashable, Any] = field(default_factory=dict, init=False, compare=False)

    def once(self, name: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns, worked out when it is first asked for: all plans share the truth."""
        if name not in self._known:
            self._known[name] = make()
        value: T = self._known[name]
        return value

    @property
    def rooms(self) -> atrium.Rooms:
        """The world's room, on the scene's device."""
        return self.once("rooms", lambda: self.world.rooms.to(self.device))

    @property
    def time(self) -> Tensor:
        """Steps by which things have moved on, [T]."""
        return atrium.tempo_of(self.pace) * torch.arange(len(self.actions))


def frames_a_step(pace: float) -> int:
    """Frames that a whole step takes at a pace, which an evaluation's walks are made of."""
    frames = round(1 / check("pace", pace))
    if abs(frames * pace - 1) > 1e-6:
        raise TachyscopeError(
            f"an evaluation's `pace` is 1 over a whole number, got {pace}: try {1 / frames:.4f}"
        )
    return frames


def spell(steps: str, pace: float) -> str:
    """Actions of whole steps as those of frames; "stay" is one frame at every pace."""
    times = frames_a_step(pace)
    return "".join(letter if letter == "." else letter * times for letter in steps)


def make_scene(
    world: World, actions: str, device: torch.device | str = "cpu", pace: float = 1.0
) -> Scene:
    """The truth of a walk, rendered on a device."""
    pose = atrium.walk(world.start, atrium.letters(actions)[None], pace)[0]
    time = atrium.tempo_of(pace) * torch.arange(len(actions), device=device)
    frames = visit.draw(world.rooms.to(device), pose.to(device), time)
    return Scene(world, actions, pose, frames, pace, torch.device(device))


def pictures(frames: Frames) -> Tensor:
    """Frames as pictures [F, 3, S, S] in 0..1."""
    return torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2).float() / 255


def new_place(scene: Scene, given: int) -> list[int]:
    """The made frames, counted from 0, that stand a stride or more from every given one."""
    far = torch.cdist(scene.pose[given:, :2], scene.pose[:given, :2]).amin(1)
    return [i for i, way in enumerate(far.tolist()) if way >= MOVED]


def check_pace(model: VideoModel, pace: float) -> None:
    """Raise where a model without a camera is asked for another pace than 1."""
    if pace != 1 and not model.camera:
        raise TachyscopeError(
            f"{model.name} is not told where its camera stands, got `pace` {pace}: leave it out"
        )
