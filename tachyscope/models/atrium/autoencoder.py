"""The small autoencoder of Atrium's world model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tachyscope.models.checkpoint import fit, read_tensors, write_tensors
from tachyscope.models.diffusion import Decoder

STRIDE = 8  # pixels of a latent's side


class Residual(nn.Module):
    """Two 3 by 3 convolutions and a skip connection; no norm, so that features stay local."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        # the block is the identity at first, which deep stacks without norms need to train
        nn.init.zeros_(self.second.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.silu(self.first(F.silu(x))))


class Autoencoder(nn.Module):
    """Pictures [B, 3, 8h, 8w] in 0..1 to latents [B, channels, h, w] of about unit variance.

    Deterministic. The batch statistics of training become the fixed mean and scale of `norm`.
    """

    def __init__(
        self, channels: int = 16, coarse: int = 96, fine: int = 64, edge: int = 32
    ) -> None:
        super().__init__()
        self.channels = channels
        self.encoder = nn.Sequential(
            nn.PixelUnshuffle(4),
            nn.Conv2d(48, fine, 3, padding=1),
            Residual(fine),
            Residual(fine),
            nn.Conv2d(fine, coarse, 3, stride=2, padding=1),
            Residual(coarse),
            Residual(coarse),
            nn.Conv2d(coarse, channels, 3, padding=1),
        )
        self.norm = nn.BatchNorm2d(channels, affine=False, momentum=0.02)
        self.decoder = nn.Sequential(
            nn.Conv2d(channels, coarse, 3, padding=1),
            Residual(coarse),
            Residual(coarse),
            Residual(coarse),
            nn.Conv2d(coarse, 4 * fine, 1),
            nn.PixelShuffle(2),
            Residual(fine),
            Residual(fine),
            Residual(fine),
            nn.Conv2d(fine, 4 * edge, 1),
            nn.PixelShuffle(2),
            Residual(edge),
            Residual(edge),
            nn.Conv2d(edge, 12, 3, padding=1),
            nn.PixelShuffle(2),
        )

    def encode(self, pixels: Tensor) -> Tensor:
        return self.norm(self.encoder(pixels * 2 - 1))

    def decode(self, latents: Tensor) -> Tensor:
        """Pictures, which may overshoot 0..1 a little."""
        return self.decoder(latents) * 0.5 + 0.5

    def forward(self, pixels: Tensor, noise: Tensor | float = 0.0) -> Tensor:
        """The picture encoded, with noise of this strength on its latents, and decoded."""
        latents = self.encode(pixels)
        return self.decode(latents + noise * torch.randn_like(latents))


class AutoencoderDecoder(Decoder):
    """Decodes each latent frame to a frame by the autoencoder."""

    kind = name = "autoencoder"
    file = "decoder.safetensors"

    def __init__(self, model: Autoencoder) -> None:
        self.model = model.eval().requires_grad_(False)

    @classmethod
    def read(cls, folder: Path, config: Any, device: torch.device | str = "cpu") -> Self:
        """The autoencoder in a model's folder; `config` has in_channels."""
        model = Autoencoder(config.in_channels)
        fit(model, read_tensors(folder / cls.file), str(folder / cls.file))
        # moved now: else the first video's given frames would be encoded on the CPU, and those of
        # later videos on the GPU
        return cls(model.to(device))

    def write(self, folder: Path) -> None:
        write_tensors(folder / self.file, self.model.state_dict())

    def pixel_frames(self, latents: int) -> int:
        return latents

    def encode(self, frames: np.ndarray | Tensor) -> Tensor:
        place = next(self.model.parameters()).device
        pixels = torch.as_tensor(frames).to(place).permute(0, 3, 1, 2).float() / 255
        return self.model.encode(pixels).transpose(0, 1)[None]

    def levels(self, latents: Tensor, features: dict[str, Tensor]) -> Tensor:
        pixels = self.model.decode(latents[0].transpose(0, 1).float())
        return (255 * pixels.clamp(0, 1)).permute(0, 2, 3, 1)
