"""Keys that are down as pictures of them, added to the patches: ABot-World's adapter.

Its authors show a network a picture a key and pixel frame, all ones where the key is down. What
it makes of such pictures differs from place to place at the border alone, by what its convolutions
reach; so it is computed for a small picture, and that is drawn out.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tachyscope.models.wan import keys

LETTERS = "wasdijkl"  # in the order of its input
REACH = 2  # places that a border is felt: two convolutions of 3 by 3


class Residual(nn.Module):
    """Two convolutions beside an identity."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(dim, dim, 3, padding=1)
        self.conv2 = nn.Conv2d(dim, dim, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.conv1(x)))


class KeyAdapter(nn.Module):
    """From the keys that are down in a latent frame to what its patches gain.

    `each` is how many numbers of a latent place tell one key: its pixels, in all its frames.
    """

    def __init__(self, dim: int, each: int, patch: tuple[int, int]) -> None:
        super().__init__()
        self.each, self.patch = each, patch
        self.conv = nn.Conv2d(len(LETTERS) * each, dim, patch, patch)
        self.residual_blocks = nn.Sequential(Residual(dim))

    def forward(self, down: Tensor, grid: tuple[int, int]) -> Tensor:
        """What frames of a grid gain [1, F · N, W], by the keys that are down [F, 8]."""
        told = down.to(self.conv.weight.dtype).repeat_interleave(self.each, 1)
        place = self.conv(told[:, :, None, None].expand(-1, -1, *self.patch))
        high, wide = (min(side, 2 * REACH + 1) for side in grid)
        field = self.residual_blocks(place.expand(-1, -1, high, wide))
        rows, columns = (_drawn_out(side, down.device) for side in grid)
        return field[:, :, rows[:, None], columns].flatten(2).transpose(1, 2).flatten(0, 1)[None]

    def macs(self, grid: tuple[int, int]) -> int:
        """Multiply-adds for a latent frame."""
        first, (high, wide) = self.conv.weight, (min(side, 2 * REACH + 1) for side in grid)
        return first.numel() + high * wide * 2 * 9 * first.shape[0] ** 2


def _drawn_out(side: int, device: torch.device) -> Tensor:
    """For each place along a side, the place of the small picture that it is like."""
    at = torch.arange(side, device=device)
    if side <= 2 * REACH + 1:
        return at
    return torch.where(at < side - REACH, at.clamp(max=REACH), at - (side - 2 * REACH - 1))


@functools.cache
def pressed(device: torch.device) -> Tensor:
    """Which of LETTERS are down in each action [A, 8]."""
    rows: Any = [[key in keys.pressed(action) for key in LETTERS] for action in keys.ACTIONS]
    return torch.tensor(rows, dtype=torch.float32, device=device)
