"""What stands in for the parts that a timed model lacks: a toy's, or a VAE of random weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from tachyscope.models.wan.model import WanModel
from tachyscope.models.wan.plain_parts import BytesText, Preview
from tachyscope.models.wan.text import needed
from tachyscope.models.wan.vae import WanVae


def with_toy_parts(model: WanModel) -> WanModel:
    """A model to be timed: what it lacks of a text encoder and a decoder is a toy's."""
    clone = copy.copy(model)
    clone.text = model.text or BytesText.seeded(model.config, 0)
    if model.decoder is None:
        clone.decoder = Preview.seeded(model.config, 0)
        clone.context = model.context.without_reencoding()  # a preview encodes nothing
    return clone


def random_vae(channels: int, dtype: torch.dtype) -> WanVae:
    """A VAE of random weights, with Wan 2.1's numbers, or with 2.2's for 48 channels."""
    diffusers = needed("diffusers", "the size of Wan's VAE")
    settings: dict[str, Any] = {"z_dim": channels}
    if channels == 48:
        settings |= {
            "base_dim": 160, "decoder_base_dim": 256, "is_residual": True, "in_channels": 12,
            "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16,
            "latents_mean": [0.0] * 48, "latents_std": [1.0] * 48,
        }  # fmt: skip
    # diffusers' own `to` warns of modules to keep in float32, of which this model has none
    made = WanVae(nn.Module.to(diffusers.AutoencoderKLWan.from_config(settings), dtype))
    made.name = f"{WanVae.name} (random weights)"
    return made
