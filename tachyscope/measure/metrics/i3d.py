"""I3D (arXiv 1705.07750) on RGB, as trained on Kinetics-400: what FVD sees of a clip."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIDE = 224  # pixels of a clip's frames
CLASSES = 400

# output channels of an Inception block: 1x1; 1x1 and 3x3; 1x1 and 3x3; 1x1 after pooling
BLOCKS = {
    "3b": (64, 96, 128, 16, 32, 32),
    "3c": (128, 128, 192, 32, 96, 64),
    "4b": (192, 96, 208, 16, 48, 64),
    "4c": (160, 112, 224, 24, 64, 64),
    "4d": (128, 128, 256, 24, 64, 64),
    "4e": (112, 144, 288, 32, 64, 64),
    "4f": (256, 160, 320, 32, 128, 128),
    "5b": (256, 160, 320, 32, 128, 128),
    "5c": (384, 192, 384, 48, 128, 128),
}
# pooling before a block: window and stride of time, height and width
POOLS = {"3b": ((1, 3, 3), (1, 2, 2)), "4b": ((3, 3, 3), (2, 2, 2)), "5b": ((2, 2, 2), (2, 2, 2))}


def pad_same(
    x: Tensor, window: tuple[int, ...], stride: tuple[int, ...], value: float = 0.0
) -> Tensor:
    """TensorFlow's SAME padding: ceil(size / stride) outputs, the odd one of the padding last."""
    pads: list[int] = []
    for size, w, s in zip(x.shape[:1:-1], window[::-1], stride[::-1], strict=True):
        total = max((-(-size // s) - 1) * s + w - size, 0)
        pads += [total // 2, total - total // 2]
    return F.pad(x, pads, value=value)


def max_pool(x: Tensor, window: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    return F.max_pool3d(pad_same(x, window, stride, -torch.inf), window, stride)


class Unit(nn.Conv3d):
    """A convolution with its batch norm folded into it, and ReLU."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int = 1) -> None:
        super().__init__(channels, out, kernel, stride)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(pad_same(x, self.kernel_size, self.stride)).relu()


class Inception(nn.Module):
    """Four ways through a block, side by side."""

    def __init__(self, channels: int, out: tuple[int, ...]) -> None:
        super().__init__()
        self.one = Unit(channels, out[0], 1)
        self.two = nn.Sequential(Unit(channels, out[1], 1), Unit(out[1], out[2], 3))
        self.three = nn.Sequential(Unit(channels, out[3], 1), Unit(out[3], out[4], 3))
        self.pooled = Unit(channels, out[5], 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = max_pool(x, (3, 3, 3), (1, 1, 1))
        return torch.cat([self.one(x), self.two(x), self.three(x), self.pooled(pooled)], 1)


class I3D(nn.Module):
    """A clip's scores for the 400 classes of Kinetics, mean over time, before softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Unit(3, 64, 7, 2)
        self.second = nn.Sequential(Unit(64, 64, 1), Unit(64, 192, 3))
        self.blocks = nn.ModuleDict()
        channels = 192
        for name, out in BLOCKS.items():
            self.blocks[name] = Inception(channels, out)
            channels = out[0] + out[2] + out[4] + out[5]
        self.scores = nn.Conv3d(channels, CLASSES, 1)

    def forward(self, clips: Tensor) -> Tensor:
        """Scores [B, 400] of clips [B, 3, F, 224, 224] from -1 to 1, of 9 frames or more."""
        x = max_pool(self.first(clips), (1, 3, 3), (1, 2, 2))
        x = self.second(x)
        for name, block in self.blocks.items():
            x = max_pool(x, *POOLS[name]) if name in POOLS else x
            x = block(x)
        scores: Tensor = self.scores(F.avg_pool3d(x, (2, 7, 7), 1))
        return scores.mean((2, 3, 4))
