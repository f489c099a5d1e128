"""The town's world model: its numbers, what it is told, and pixels as latents."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from tachyscope.models.checkpoint import read_json
from tachyscope.models.diffusion import Decoder
from tachyscope.models.wan.config import WanConfig
from tachyscope.models.wan.model import WanModel
from tachyscope.models.wan.parts import Controls
from tachyscope.models.wan.plain_parts import BytesText
from tachyscope.models.wan.transformer import WanCausal
from tachyscope_lab.worlds import town

PATCH, HEAD = town.STEP, 32  # pixels of a token's side, a step of the window; a head's width
WEIGHTS = "diffusion_pytorch_model"
ACROSS, DOWN = (1, 2, 4, 8, 16, 24), (1, 2, 4, 8, 16)  # waves around the map, half waves down it


def make_config(width: int, layers: int) -> WanConfig:
    """A causal Wan of one frame a chunk; its prompt is one constant token."""
    return WanConfig(
        dim=width,
        ffn_dim=4 * width,
        layers=layers,
        heads=width // HEAD,
        in_channels=3 * PATCH**2,
        text_dim=16,
        text_len=1,
        patch=(1, 1, 1),
        chunk=1,
        steps=(1000, 750, 500, 250),
        shift=3.0,
        prediction="x0",
        size=(town.VIEW // PATCH, town.VIEW // PATCH),
        stride=(1, PATCH, PATCH),
        fps=8,
        stock="cache=keep_all attention=dense text=dense replay=none",
        text_encoder="bytes",
    )


class TownCausal(WanCausal):
    """Wan's transformer, every token of which is told where on the map it lies."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__(config)
        self.place_embedding = nn.Linear(2 * len(ACROSS + DOWN), config.dim)
        nn.init.normal_(self.place_embedding.weight, std=0.3)

    def _embed(self, session: Any, latents: Tensor, t: Tensor, told: Controls) -> Any:
        assert told.actions is not None
        numbers = told.actions.expand(len(latents), -1)  # [B, F]
        added = self.place_embedding(waves(numbers).to(self.place_embedding.weight.dtype))
        told = told._replace(actions=None, added=added.flatten(1, 2))
        return super()._embed(session, latents, t, told)


def waves(numbers: Tensor) -> Tensor:
    """Sines and cosines [..., tokens, 22] of the map's place where each token of a frame lies.

    `numbers` are those of the frames' letters in town.PLACES.
    """
    side = PATCH * torch.arange(town.VIEW // PATCH, device=numbers.device)
    down, across = (x.flatten() for x in torch.meshgrid(side, side, indexing="ij"))
    x = (numbers % town.WIDTH)[..., None] + across
    y = (numbers // town.WIDTH)[..., None] + down
    angles = torch.cat(
        [
            2 * math.pi / town.WIDTH * x[..., None] * x.new_tensor(ACROSS),
            math.pi / town.HEIGHT * y[..., None] * y.new_tensor(DOWN),
        ],
        -1,
    )
    return torch.cat([angles.sin(), angles.cos()], -1)


def to_latents(pictures: Tensor) -> Tensor:
    """Pictures [..., 3, H, W] in 0..1 as latents [..., 48, H / 4, W / 4] in -1..1."""
    return F.pixel_unshuffle(2 * pictures - 1, PATCH)


def to_pictures(latents: Tensor) -> Tensor:
    return (F.pixel_shuffle(latents, PATCH) + 1) / 2


class Pixels(Decoder):
    """Every place's channels are the pixels of its patch: nothing is lost, nothing is learned."""

    kind = name = "pixels"

    def pixel_frames(self, latents: int) -> int:
        return latents

    def encode(self, frames: np.ndarray | Tensor) -> Tensor:
        pixels = torch.as_tensor(frames).permute(0, 3, 1, 2).float() / 255
        return to_latents(pixels).transpose(0, 1)[None]

    def levels(self, latents: Tensor, features: dict[str, Tensor]) -> Tensor:
        pictures = to_pictures(latents[0].transpose(0, 1).float())
        return (255 * pictures.clamp(0, 1)).permute(0, 2, 3, 1)

    def write(self, folder: Path) -> None:
        """Nothing: it has no weights."""


def load_model(folder: Path, device: str, dtype: str) -> WanModel:
    """The model in a folder that training wrote, as `tachyscope.open` takes it."""
    config = WanConfig.from_json(read_json(folder / "config.json"), str(folder))
    network = TownCausal(config)
    network.load_state_dict(load_file(folder / f"{WEIGHTS}.safetensors"))
    network = network.cast(getattr(torch, dtype)).to(device).eval().requires_grad_(False)
    return as_model(network, BytesText.read(folder, config))


def as_model(network: TownCausal, text: BytesText | None = None) -> WanModel:
    model = WanModel("town-world", network, text, Pixels())
    model.actions = town.PLACES
    return model


def frames_of(pictures: Tensor) -> np.ndarray:
    """Pictures [F, 3, H, W] in 0..1 as frames uint8 [F, H, W, 3]."""
    return (255 * pictures).round().byte().permute(0, 2, 3, 1).cpu().numpy()
