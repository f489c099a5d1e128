"""A Wan-type model of random weights, at any size: for tests, and for a clock."""

from __future__ import annotations

import torch

from tachyscope.models.checkpoint import allocate
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
    model = allocate(model, device, name)
    generator = torch.Generator(device).manual_seed(seed)
    for key, parameter in model.named_parameters():
        # always drawn in float32, so that every dtype rounds the same weights
        drawn = torch.randn(
            parameter.shape, generator=generator, dtype=torch.float32, device=device
        )
        if key.endswith("modulation"):
            drawn *= 0.1
            if key.startswith("blocks"):
                # gates near one let every layer speak
                drawn[:, 2::3] += 1
        elif "norm" in key and key.endswith("weight"):
            # logits of spread two: flat attention would hide what a policy leaves out
            drawn.fill_(2**0.5)
        elif key.endswith("bias"):
            drawn *= 0.1
        elif not key.startswith("action"):
            drawn *= drawn[0].numel() ** -0.5
            if "cam_scale" in key:  # what a stream is multiplied by in every layer is near one
                drawn *= 0.1
        parameter.data.copy_(drawn)
    text, decoder = BytesText.seeded(config, seed), Preview.seeded(config, seed)
    made = WanModel(name, model.eval(), None if config.pad else text, decoder)
    if config.pad:
        made.clip = ImageMeans(config)
    return made
