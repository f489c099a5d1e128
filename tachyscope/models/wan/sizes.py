"""Memory of Wan's published VAE and text encoder, to predict it without loading them.

The VAE's numbers are those of diffusers' AutoencoderKLWan, to the byte: tests hold them to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.types import dtype_name
from tachyscope.models.diffusion import Decoder

NO_WEIGHTS = "this model is known by its sizes alone: load it with weights"
UMT5_BYTES = 2 * 5_680_910_336  # UMT5-XXL's encoder in bfloat16, which runs on the CPU


@dataclass(frozen=True)
class VaeBytes:
    """A VAE's bytes: its weights, and the rest for each position of a latent frame."""

    weights: int
    state: int  # kept by its causal convolutions between chunks
    one: int  # peak while one latent frame is decoded
    two: int  # peak while two are
    more: int  # more for each further one
    encoder: int  # kept by an encoder between chunks
    # peak of decoding two in bands, for each column of a latent frame
    row: int  # for each row of a band
    beside: int  # whatever the band


SIZES = {
    (16, 2): VaeBytes(253_785_062, 302_656, 746_112, 796_864, 1_600, 179_712, 640_000, 843_000),
    (16, 4): VaeBytes(
        507_570_124, 605_312, 1_121_536, 1_199_488, 3_200, 359_424, 820_000, 1_933_000
    ),
    (48, 2): VaeBytes(
        1_409_377_336, 913_600, 2_880_896, 3_411_520, 6_336, 301_312, 2_800_000, 2_400_000
    ),
    (48, 4): VaeBytes(
        2_818_754_672, 1_827_200, 4_317_952, 4_985_984, 12_672, 602_624, 3_330_000, 6_700_000
    ),
}


class VaeSize(Decoder):
    """The memory of Wan's VAE, 2.1's, or 2.2's for 48 channels, without its weights."""

    kind = "wan_vae"
    name = "Wan's VAE"
    bands = 1

    def __init__(self, channels: int, dtype: torch.dtype) -> None:
        width = torch.empty((), dtype=dtype, device="meta").element_size()
        if (channels, width) not in SIZES:
            raise TachyscopeError(
                f"the size of Wan's VAE is known for 16 and 48 channels in float32 and bfloat16, "
                f"got {channels} in {dtype_name(dtype)}: use one of these"
            )
        self.bytes = SIZES[channels, width]
        self.side = 8 if channels == 16 else 16  # pixels of a latent position, each way
        self.weights = nn.Module()
        held = torch.empty(self.bytes.weights, dtype=torch.uint8, device="meta")
        self.weights.register_parameter("all", nn.Parameter(held, requires_grad=False))

    def pixel_frames(self, latents: int) -> int:
        return max(0, 1 + 4 * (latents - 1))

    def encode(self, frames: np.ndarray | Tensor) -> Tensor:
        raise TachyscopeError(NO_WEIGHTS)

    def encoder_state(self, size: tuple[int, int]) -> int:
        return self.bytes.encoder * (size[0] // self.side) * (size[1] // self.side)

    def levels(self, latents: Tensor, features: dict[str, Tensor]) -> Tensor:
        frames, rows, columns = latents.shape[2:]
        size, places = self.bytes, rows * columns
        most = places * (size.one if frames == 1 else size.two)
        if self.bands > 1:
            most = min(most, columns * (size.row * rows // self.bands + size.beside))
        most += places * max(0, frames - 2) * size.more
        at_most = torch.empty(most, dtype=torch.uint8, device=latents.device)
        del at_most
        if not features:
            features["vae"] = latents.new_empty(size.state * places, dtype=torch.uint8)
        return latents.new_empty(0)

    def __call__(self, latents: Tensor, features: dict[str, Tensor]) -> np.ndarray:
        self.levels(latents, features)
        return np.empty((0, 0, 0, 3), np.uint8)

    def write(self, folder: Path) -> None:
        raise TachyscopeError(NO_WEIGHTS)


class Umt5Size:
    """The memory of UMT5, without its weights."""

    kind = "umt5"
    host_bytes = UMT5_BYTES

    def __call__(self, prompt: str) -> Any:
        raise TachyscopeError(NO_WEIGHTS)

    def write(self, folder: Path) -> None:
        raise TachyscopeError(NO_WEIGHTS)
