"""Short clips of unseen worlds for token models: frames to be given, and those that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tachyscope.measure.quality import Frames
from tachyscope.models.atrium import world as atrium
from tachyscope.models.atrium.visit import World, draw, stir_world
from tachyscope.models.registry import MODELS
from tachyscope.models.vila_u.model import VilaModel
from tachyscope_lab.evaluation.scenes import WORLDS_A_SEED, make_world

GIVEN = 8
PACE, TEMPO = MODELS["atrium-tokens"].pace, MODELS["atrium-tokens"].tempo
# Letters of the given frames, then of the made ones, by kind of camera as in training.
CLIPS = {
    "reversing": (".qqqqqqq", "eeeeeeee"),  # sees again what the given frames showed
    "forward": (".qqqqqqq", "qqqqqqqq"),  # what comes into view was never seen
    "walk": (".wwwwwww", "ssssssss"),
    "still": ("........", "........"),  # only what moves on its own moves
}
LEVELS, MOVING = 16, 0.005  # of 255 that a pixel must change by, and share of such pixels


@dataclass(frozen=True)
class Clip:
    """Walks through worlds, one row each: prompts, actions and true frames."""

    worlds: tuple[World, ...]
    actions: tuple[str, ...]  # letters of each row, as many in all
    frames: tuple[Frames, ...]  # [T, H, W, 3] of each

    @property
    def length(self) -> int:
        return len(self.actions[0])

    @property
    def moves(self) -> Tensor:
        """Numbers of the actions [T, V]: `moves[i : i + 1]` is a frame's, one a row."""
        return torch.stack([atrium.letters(letters) for letters in self.actions], 1)

    def action(self, frame: int, device: torch.device) -> Any:
        """A frame's action as a model takes it: one for all rows where they agree."""
        if len(set(self.actions)) == 1:
            return self.moves[frame, :1].tolist()
        return self.moves_on(device)[frame : frame + 1]

    def moves_on(self, device: torch.device) -> Any:
        """The same where a model is: it takes a tensor of one row a frame for a list of actions."""
        return self.moves.to(device)


def make_clip(
    name: str, worlds: int, seed: int = 0, size: int = atrium.SIZE, made: int | None = None
) -> Clip:
    """A named clip's truth in so many unseen worlds, with so many frames behind the given ones.

    Before a resting camera something moves: rooms in which nothing would be seen to are left out.
    """
    first, then = CLIPS[name]
    letters = first + (then if made is None else then[:1] * made)
    moves, time = atrium.letters(letters)[None], TEMPO * torch.arange(len(letters))
    still = set(letters) == {"."}
    chosen: list[World] = []
    films: list[Frames] = []
    for number in range(WORLDS_A_SEED):
        if len(chosen) == worlds:
            break
        world = make_world(seed, number)
        world = stir_world(world) if still else world
        film = draw(world.rooms, atrium.walk(world.start, moves, PACE)[0], time, size)
        if not still or moving(film) >= MOVING:
            chosen.append(world)
            films.append(film)
    return Clip(tuple(chosen), (letters,) * worlds, tuple(films))


def moving(film: Frames) -> float:
    """Share of the picture that differs, in a frame behind the given ones, from the last given."""
    far = np.abs(film[GIVEN:].astype(np.int16) - film[GIVEN - 1]).max(-1)
    return float((far > LEVELS).mean((1, 2)).max())


def join(clips: Sequence[Clip]) -> Clip:
    """Clips of one length as rows of one."""
    worlds, actions, frames = (
        tuple(x for clip in clips for x in getattr(clip, name))
        for name in ("worlds", "actions", "frames")
    )
    return Clip(worlds, actions, frames)


@torch.inference_mode()
def true_codes(model: VilaModel, clip: Clip) -> Tensor:
    """Codes [V, T, rows, columns, D] of a clip's true frames."""
    return torch.cat([model.encode_frames(frames) for frames in clip.frames])
