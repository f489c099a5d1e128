"""Short clips of unseen worlds for token models: frames to be given, and those that follow."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tachyscope.evaluation.scenes import make_world
from tachyscope.models.registry import MODELS
from tachyscope.models.vila_u.model import VilaModel
from tachyscope.quality import Frames
from tachyscope.worlds import atrium
from tachyscope.worlds.visit import World, draw

GIVEN = 8
PACE, TEMPO = MODELS["atrium-tokens"].pace, MODELS["atrium-tokens"].tempo
# Letters of the given frames, then of the made ones, by kind of camera as in training.
CLIPS = {
    "reversing": (".qqqqqqq", "eeeeeeee"),  # sees again what the given frames showed
    "forward": (".qqqqqqq", "qqqqqqqq"),  # what comes into view was never seen
    "walk": (".wwwwwww", "ssssssss"),
    "still": ("........", "........"),  # only what moves on its own moves
}


@dataclass(frozen=True)
class Clip:
    """Worlds that the same actions lead through, one row each: their prompts and true frames."""

    worlds: tuple[World, ...]
    actions: str
    frames: tuple[Frames, ...]  # [T, H, W, 3] of each

    @property
    def moves(self) -> list[int]:
        return [atrium.ACTIONS.index(letter) for letter in self.actions]


def make_clip(name: str, worlds: int, seed: int = 0, size: int = atrium.SIZE) -> Clip:
    """A named clip's truth in so many unseen worlds."""
    given, made = CLIPS[name]
    found = tuple(make_world(seed, number) for number in range(worlds))
    moves, time = atrium.letters(given + made)[None], TEMPO * torch.arange(len(given + made))
    poses = [atrium.walk(world.start, moves, PACE)[0] for world in found]
    films = [draw(world.rooms, pose, time, size) for world, pose in zip(found, poses, strict=True)]
    return Clip(found, given + made, tuple(films))


@torch.inference_mode()
def true_codes(model: VilaModel, clip: Clip) -> Tensor:
    """Codes [V, T, rows, columns, D] of a clip's true frames."""
    return torch.cat([model.encode_frames(frames) for frames in clip.frames])
