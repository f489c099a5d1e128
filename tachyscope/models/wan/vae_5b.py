"""Wan 2.2's VAE in its original file: diffusers' names of its tensors, and its settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

# by channel: a model's latents are the VAE's less the mean, divided by the deviation
MEAN = (
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813,
    0.0891, 0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108,
    -0.2158, 0.2502, -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313,
    -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944,
    0.3573, -0.0548, -0.1681, -0.0667,
)  # fmt: skip
STD = (
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
    0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
    0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944,
    0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
)  # fmt: skip
RESIDUAL = {"0": "norm1", "2": "conv1", "3": "norm2", "6": "conv2"}
# patterns of original names, and their replacements in diffusers' names
RENAMED = (
    (r"^conv1\.", "quant_conv."),
    (r"^conv2\.", "post_quant_conv."),
    (r"^(encoder|decoder)\.conv1\.", r"\1.conv_in."),
    (r"\.head\.0\.", ".norm_out."),
    (r"\.head\.2\.", ".conv_out."),
    (r"\.middle\.1\.", ".mid_block.attentions.0."),
    (r"\.middle\.0\.", ".mid_block.resnets.0."),
    (r"\.middle\.2\.", ".mid_block.resnets.1."),
    (r"\.(down|up)samples\.(\d+)\.\w+\.\d+\.(resample|time_conv)\.",
     r".\1_blocks.\2.\1sampler.\3."),
    (r"\.(down|up)samples\.(\d+)\.\w+\.", r".\1_blocks.\2.resnets."),
    (r"\.shortcut\.", ".conv_shortcut."),
)  # fmt: skip


def known(tensors: Mapping[str, Tensor]) -> bool:
    """Whether tensors have Wan 2.2's layout rather than Wan 2.1's."""
    return any(name.startswith("encoder.downsamples.0.downsamples.") for name in tensors)


def settings(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The VAE's settings as in diffusers' config.json."""
    channels = tensors["conv2.weight"].shape[0]
    published = channels == len(MEAN)  # a VAE of other channels has no published statistics
    return {
        "base_dim": tensors["encoder.conv1.weight"].shape[0],
        "decoder_base_dim": tensors["decoder.conv1.weight"].shape[0] // 4,
        "z_dim": channels,
        "in_channels": tensors["encoder.conv1.weight"].shape[1],
        "out_channels": tensors["encoder.conv1.weight"].shape[1],
        "patch_size": 2,
        "is_residual": True,
        "scale_factor_spatial": 16,
        "latents_mean": list(MEAN if published else (0.0,) * channels),
        "latents_std": list(STD if published else (1.0,) * channels),
    }


def renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under diffusers' names."""
    return {_name(name): tensor for name, tensor in tensors.items()}


def _name(name: str) -> str:
    name = re.sub(r"\.residual\.([0236])\.", lambda found: f".{RESIDUAL[found[1]]}.", name)
    for original, ours in RENAMED:
        name = re.sub(original, ours, name)
    return name
