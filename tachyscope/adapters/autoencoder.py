"""The small autoencoder between Atrium's pictures and the latents that its world model sees."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STRIDE = 8  # pixels of a latent's side


class Residual(nn.Module):
    """Two 3 by 3 convolutions beside an identity; no norm, so a picture's parts stay local."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        # the block begins as the identity: deep stacks without norms then train at once
        nn.init.zeros_(self.second.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.silu(self.first(F.silu(x))))


class Autoencoder(nn.Module):
    """Pictures [B, 3, 8h, 8w] in 0..1 to latents [B, channels, h, w] of about unit variance.

    Deterministic. The batch statistics of training become the fixed mean and scale of `norm`.
    """

    def __init__(self, channels: int = 16, fine: int = 64, coarse: int = 96) -> None:
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
            nn.Conv2d(fine, 48, 3, padding=1),
            nn.PixelShuffle(4),
        )

    def encode(self, pixels: Tensor) -> Tensor:
        return self.norm(self.encoder(pixels * 2 - 1))

    def decode(self, latents: Tensor) -> Tensor:
        """Pictures; a little outside 0..1 where the decoder overshoots."""
        return self.decoder(latents) * 0.5 + 0.5

    def forward(self, pixels: Tensor, noise: Tensor | float = 0.0) -> Tensor:
        """The picture after encoding, noise of that strength on the latents, and decoding."""
        latents = self.encode(pixels)
        return self.decode(latents + noise * torch.randn_like(latents))
