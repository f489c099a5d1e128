"""The autoencoder of Lodge's pictures: as many tokens as Atrium's, of four times the pixels.

A latent covers 16 x 16 pixels, so that 256 x 256 pixels are 16 x 16 latents, 64 tokens of 2 x 2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tachyscope.models.atrium import autoencoder as atrium
from tachyscope.models.atrium.autoencoder import Residual

STRIDE = 16  # pixels of a latent's side
CHANNELS = 32
WIDTHS = (96, 96, 64, 32)  # at a latent's side of 16, 8, 4 and 2 pixels
DEPTHS = (3, 3, 2, 1)  # residual blocks there


class Autoencoder(atrium.Autoencoder):
    """Pictures [B, 3, 16h, 16w] in 0..1 to latents [B, channels, h, w] of about unit variance."""

    def __init__(self, channels: int = CHANNELS, widths: tuple[int, ...] = WIDTHS) -> None:
        super().__init__(channels)
        coarse, middle, fine, edge = widths
        down: list[nn.Module] = [nn.PixelUnshuffle(4), nn.Conv2d(48, fine, 3, padding=1)]
        for before, width in ((fine, middle), (middle, coarse)):
            down += [Residual(before), Residual(before)]
            down.append(nn.Conv2d(before, width, 3, stride=2, padding=1))
        down += [Residual(coarse), Residual(coarse), nn.Conv2d(coarse, channels, 3, padding=1)]
        up: list[nn.Module] = [nn.Conv2d(channels, coarse, 3, padding=1)]
        for width, depth, after in zip(widths, DEPTHS, (*widths[1:], 0), strict=True):
            up += [Residual(width) for _ in range(depth)]
            if after:
                up += [nn.Conv2d(width, 4 * after, 1), nn.PixelShuffle(2)]
        up += [nn.Conv2d(edge, 12, 3, padding=1), nn.PixelShuffle(2)]
        self.encoder, self.decoder = nn.Sequential(*down), nn.Sequential(*up)


def multiply_adds(module: nn.Module, x: Tensor) -> int:
    """Of the convolutions of a module for one input [1, C, H, W]."""
    total = 0

    def count(conv: nn.Conv2d, _: tuple[Tensor, ...], out: Tensor) -> None:
        nonlocal total
        total += out.numel() * conv.weight[0].numel()

    hooks = [m.register_forward_hook(count) for m in module.modules() if isinstance(m, nn.Conv2d)]
    with torch.no_grad():
        module(x)
    for hook in hooks:
        hook.remove()
    return total
