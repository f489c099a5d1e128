"""Lodge's world model, loaded as a model of one's own: its words, its pictures, its walker.

tachyscope play tachyscope_lab.worlds.lodge.model:load --weights FOLDER
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from tachyscope.models.atrium import camera as atrium_camera
from tachyscope.models.atrium.autoencoder import AutoencoderDecoder
from tachyscope.models.atrium.words import WordEncoder, WordTextEncoder
from tachyscope.models.checkpoint import check_finite, fit, read_tensors
from tachyscope.models.wan.loading import DECODERS, TEXT_ENCODERS, load_wan
from tachyscope.models.wan.model import WanModel
from tachyscope_lab.worlds.lodge import camera, plan, prompts
from tachyscope_lab.worlds.lodge.autoencoder import Autoencoder

WIDE = 2 * plan.OUTER


class LodgeWords(WordTextEncoder):
    """A prompt in Lodge's words."""

    kind = "lodge_words"

    @classmethod
    def read(cls, folder: Path, config: Any) -> Self:
        model = WordEncoder(len(prompts.WORDS), config.text_len, config.text_dim)
        fit(model, read_tensors(folder / cls.file), str(folder / cls.file))
        check_finite(model, str(folder / cls.file))
        return cls(model)

    @torch.no_grad()
    def __call__(self, prompt: str) -> tuple[Tensor, int]:
        tokens = prompts.tokenize(prompt)
        return self.model(prompts.pad([tokens])), len(tokens)


class LodgePictures(AutoencoderDecoder):
    """From latents of 16 x 16 pixels to frames."""

    kind = "lodge_autoencoder"

    @classmethod
    def read(cls, folder: Path, config: Any, device: torch.device | str = "cpu") -> Self:
        model = Autoencoder(config.in_channels)
        fit(model, read_tensors(folder / cls.file), str(folder / cls.file))
        return cls(model.to(device))


class Walker:
    """How a camera walks through a house, as `WanModel.walker` has it; the house is 1 wide."""

    START = (0.5 - plan.MIDDLE / WIDE, 0.5 - plan.MIDDLE / WIDE, 0.0)  # the middle of a room
    NEAR = plan.MARGIN / WIDE

    @staticmethod
    def at(starts: Sequence[Sequence[float]], pace: float, device: torch.device) -> Tensor:
        """A camera [B, 4] in metres for each start (x, y, degrees), at a part of a pace."""
        metres = [[WIDE * (x - 0.5), WIDE * (y - 0.5), turned] for x, y, turned in starts]
        return atrium_camera.at(metres, pace * camera.PACE, device)

    @staticmethod
    def walk(cameras: Tensor, actions: Tensor) -> Tensor:
        """The poses [B, F, 3] that actions [F] lead cameras [B, 4] to, which then stand there."""
        each = actions.expand(len(cameras), -1)
        poses = camera.walk(cameras[:, :3], each, cameras[:, 3])
        cameras[:, :3] = poses[:, -1]
        return poses

    matrices = staticmethod(atrium_camera.matrices)

    @staticmethod
    def rays(poses: Tensor, grid: tuple[int, int]) -> Tensor:
        """What every token of frames at poses [B, F, 3] looks at: [B, F * N, 8]."""
        return camera.rays(poses, grid[0]).flatten(1, 2)


def load(weights: str | Path, device: torch.device | str, dtype: torch.dtype) -> WanModel:
    """Lodge: four furnished rooms at 256 x 256, by a folder that train_atrium_world.py wrote."""
    TEXT_ENCODERS[LodgeWords.kind] = LodgeWords.read
    DECODERS[LodgePictures.kind] = LodgePictures.read
    model = load_wan(weights, device=device, dtype=dtype)
    model.name, model.walker, model.world = "lodge", Walker, Walker
    return model
