"""A Wan-type model of random weights, at any size."""

from __future__ import annotations

import torch
from torch import Tensor

from tachyscope.models.random_weights import random_module
from tachyscope.models.wan.config import WanConfig
from tachyscope.models.wan.model import WanModel
from tachyscope.models.wan.plain_parts import BytesText, ImageMeans, Preview
from tachyscope.models.wan.transformer import WanCausal


def random_wan(
    config: WanConfig,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    name: str = "random",
) -> WanModel:
    """A model of random weights, scaled so that attention is sharp and nothing explodes."""
    with torch.device("meta"):
        model = WanCausal(config).cast(dtype)
    model = random_module(model, seed, device, name, _scale)
    text, decoder = BytesText.seeded(config, seed), Preview.seeded(config, seed)
    made = WanModel(name, model.eval(), None if config.action_modules else text, decoder)
    if config.action_modules:
        made.clip = ImageMeans(config)
    return made


def _scale(name: str, drawn: Tensor) -> None:
    if name.endswith("modulation"):
        drawn *= 0.1
        if name.startswith("blocks"):
            # gates near one let every layer speak
            drawn[:, 2::3] += 1
    elif "norm" in name and name.endswith("weight"):
        # logits of spread two: flat attention would hide what a policy leaves out
        drawn.fill_(2**0.5)
    elif name.endswith("bias"):
        drawn *= 0.1
    elif not name.startswith("action"):
        drawn *= drawn[0].numel() ** -0.5
        if "cam_scale" in name:  # every layer multiplies the stream by one plus this
            drawn *= 0.1
