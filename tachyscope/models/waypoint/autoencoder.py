"""Waypoint's autoencoder taehv1_5, and a preview without weights."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tachyscope.core.errors import TachyscopeError
from tachyscope.models.checkpoint import check_finite, matched, read_tensors, write_tensors
from tachyscope.models.diffusion import LatentSizes
from tachyscope.models.wan.plain_parts import Preview
from tachyscope.models.wan.tiny_decoder import TinyDecoder
from tachyscope.models.wan.tiny_layers import (
    RANDOM,
    TIME,
    MemoryBlock,
    TinyLayers,
    random_layers,
    read_layers,
)

NAME = "taehv1_5"
FILES = (f"{NAME}.pth", f"{NAME}.safetensors")
WIDE = 64  # channels of the encoder
PATCH = 2
WARM = 3  # times that a video's first latent frame is decoded before it is shown


class Stills(Preview):
    """A preview in which every latent frame, the first too, is four frames."""

    def pixel_frames(self, latents: int) -> int:
        return self.stride[0] * latents

    def levels(self, latents: Tensor, features: dict[str, Tensor]) -> Tensor:
        self.skip(latents, features)
        return super().levels(latents, features)


class Pool(nn.Module):
    """`times` frames [F, C, h, w] as one."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.times = times
        self.conv = nn.Conv2d(times * width, width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.unflatten(0, (-1, self.times)).flatten(1, 2))


class TinyEncoder(nn.Module):
    """The encoder's layers under their published names, `encoder.0` to `encoder.17`."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3 * PATCH**2, WIDE, 3, padding=1), nn.ReLU()]
        for times in (2, 2, 1):
            down = nn.Conv2d(WIDE, WIDE, 3, stride=2, padding=1, bias=False)
            layers += [Pool(WIDE, times), down, *(MemoryBlock(WIDE) for _ in range(3))]
        self.encoder = nn.Sequential(*layers, nn.Conv2d(WIDE, channels, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        """Latents [F, C, h, w] of a video's frames [4F, 3, H, W], 0 to 1."""
        x = F.pixel_unshuffle(x, PATCH)
        for layer in self.encoder:
            if isinstance(layer, MemoryBlock):
                x = layer(x, torch.cat([torch.zeros_like(x[:1]), x[:-1]]))
            else:
                x = layer(x)
        return x


class TinyAutoencoder(TinyDecoder):
    """taehv1_5, in which every latent frame, the first too, is four frames."""

    trim = 0

    def __init__(self, layers: TinyLayers, encoder: TinyEncoder | None, name: str = NAME) -> None:
        super().__init__(layers, name, warm=WARM)
        self.encoder = encoder

    @classmethod
    def find(
        cls,
        places: Iterable[Path],
        config: LatentSizes,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> Self | None:
        """The decoder in the first of `places`: a file, or a folder with the published one."""
        for place in places:
            if not place.is_dir():
                return cls.open(place, config, device, dtype)
            for file in FILES:
                if (place / file).is_file():
                    return cls.open(place / file, config, device, dtype)
        return None

    @classmethod
    def open(
        cls,
        path: Path,
        config: LatentSizes,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> Self:
        """The decoder, and encoder if there is one, of a published file; or `random-tiny`."""
        if str(path) == RANDOM:
            layers = random_layers(config, device).place(device, dtype)
            return cls(layers, None, f"{NAME} (random weights)")
        tensors, encoder = read_tensors(path), None
        layers = read_layers(tensors, config, str(path)).place(device, dtype)
        own = {name: x for name, x in tensors.items() if name.startswith("encoder.")}
        if own:
            with torch.device("meta"):
                encoder = TinyEncoder(config.in_channels)
            encoder.load_state_dict(matched(encoder, own, str(path)), assign=True)
            check_finite(encoder, str(path))
            encoder = encoder.to(device, dtype).eval().requires_grad_(False)
        return cls(layers, encoder, path.stem)

    @classmethod
    def sized(cls, config: LatentSizes, dtype: torch.dtype) -> Self:
        """A decoder and encoder of the published sizes, on the meta device."""
        layers = random_layers(config, "meta").place("meta", dtype)
        with torch.device("meta"):
            encoder = TinyEncoder(config.in_channels).to(dtype)
        return cls(layers, encoder)

    def write(self, folder: Path) -> None:
        encoder = {} if self.encoder is None else self.encoder.state_dict()
        write_tensors(folder / FILES[1], self.layers.state_dict() | encoder)

    def encode(self, frames: np.ndarray | Tensor) -> Tensor:
        if self.encoder is None:
            raise TachyscopeError(
                f"{self.name} has no encoder, got pictures to begin with: give the published "
                f"{FILES[0]}"
            )
        if len(frames) == 1:  # a still image
            frames = (
                frames.repeat(TIME, 0)
                if isinstance(frames, np.ndarray)
                else frames.expand(TIME, -1, -1, -1)
            )
        if len(frames) % TIME:
            raise TachyscopeError(
                f"{self.name} encodes one picture, or frames by {TIME}, got {len(frames)}: leave "
                f"some out"
            )
        kind: Any = {"device": self.layers.mean.device, "dtype": self.layers.dtype}
        x = torch.as_tensor(frames).to(**kind).permute(0, 3, 1, 2) / 255
        return self.encoder(x).transpose(0, 1)[None]

    def encoder_state(self, size: tuple[int, int]) -> int:
        return 0
