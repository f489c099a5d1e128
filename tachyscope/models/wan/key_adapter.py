"""An adapter that adds pressed keys to the patch embeddings: ABot-World.

Its authors feed the network one constant image for each key and pixel frame. The output then varies
only near the border, as far as the convolutions reach, so it is computed for a small image and its
inner values are repeated.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tachyscope.models.wan import key_camera

LETTERS = "wasdijkl"  # in the order of its input
REACH = 2  # how far from the border the output varies: two 3 by 3 convolutions


class Residual(nn.Module):
    """Two convolutions and a skip connection."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(dim, dim, 3, padding=1)
        self.conv2 = nn.Conv2d(dim, dim, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.conv1(x)))


class KeyAdapter(nn.Module):
    """From the keys pressed in a latent frame to what is added to its patch embeddings.

    each: input channels of one key, the pixels of a latent position in all its frames.
    """

    def __init__(self, dim: int, each: int, patch: tuple[int, int]) -> None:
        super().__init__()
        self.each, self.patch = each, patch
        self.conv = nn.Conv2d(len(LETTERS) * each, dim, patch, patch)
        self.residual_blocks = nn.Sequential(Residual(dim))

    def forward(self, down: Tensor, grid: tuple[int, int]) -> Tensor:
        """What is added to the tokens [1, F · N, W] of frames with pressed keys [F, 8]."""
        keys = down.to(self.conv.weight.dtype).repeat_interleave(self.each, 1)
        place = self.conv(keys[:, :, None, None].expand(-1, -1, *self.patch))
        high, wide = (min(side, 2 * REACH + 1) for side in grid)
        field = self.residual_blocks(place.expand(-1, -1, high, wide))
        rows, columns = (_stretched(side, down.device) for side in grid)
        return field[:, :, rows[:, None], columns].flatten(2).transpose(1, 2).flatten(0, 1)[None]

    def macs(self, grid: tuple[int, int]) -> int:
        """Multiply-adds of a latent frame."""
        first, (high, wide) = self.conv.weight, (min(side, 2 * REACH + 1) for side in grid)
        return first.numel() + high * wide * 2 * 9 * first.shape[0] ** 2


def _stretched(side: int, device: torch.device) -> Tensor:
    """For each position along a side, the position of the small image that has its value."""
    at = torch.arange(side, device=device)
    if side <= 2 * REACH + 1:
        return at
    return torch.where(at < side - REACH, at.clamp(max=REACH), at - (side - 2 * REACH - 1))


@functools.cache
def pressed(device: torch.device) -> Tensor:
    """Which of LETTERS each action presses [A, 8]."""
    rows: Any = [
        [key in key_camera.pressed(action) for key in LETTERS] for action in key_camera.ACTIONS
    ]
    return torch.tensor(rows, dtype=torch.float32, device=device)
