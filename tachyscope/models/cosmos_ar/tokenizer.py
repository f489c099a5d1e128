"""Video tokenizers. NVIDIA's is a TorchScript program, which is not run here: a preview replaces
it, or the caller's own `VideoTokenizer`."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tachyscope.core.errors import TachyscopeError
from tachyscope.models.cosmos_ar.config import CosmosConfig


class VideoTokenizer(Protocol):
    """A causal video tokenizer: the first frame alone, then `stride` frames a latent frame."""

    name: str

    def encode(self, frames: np.ndarray) -> Tensor:
        """Codes [T, h, w] of frames uint8 [1 + stride (T - 1), H, W, 3]."""

    def decode(self, codes: Tensor) -> np.ndarray:
        """Frames uint8 [1 + stride (T - 1), H, W, 3] of codes [T, h, w]."""


class Preview:
    """Shows the first three levels of a code as a colour, and encodes mean colours so."""

    name = "preview"

    def __init__(self, config: CosmosConfig) -> None:
        self.config, levels = config, config.levels
        if len(levels) < 3:
            raise TachyscopeError(
                f"a preview needs codes of three parts or more, got levels {list(levels)}: "
                f"bring a tokenizer"
            )
        self.basis = [math.prod(levels[:i]) for i in range(len(levels))]

    def encode(self, frames: np.ndarray) -> Tensor:
        (time, high, wide), levels = self.config.stride, self.config.levels
        given = torch.from_numpy(np.ascontiguousarray(frames)).movedim(-1, 1).float()
        small = F.avg_pool2d(given, (high, wide))
        rest = small[1:].unflatten(0, (-1, time)).mean(1) if len(small) > 1 else small[:0]
        means = torch.cat([small[:1], rest])
        code = torch.zeros(means[:, 0].shape, dtype=torch.int64)
        for i, (base, count) in enumerate(zip(self.basis, levels, strict=True)):
            # levels that are no colour are set to their middle
            part = (means[:, i] * ((count - 1) / 255)).round() if i < 3 else count // 2
            code += (part.long() if isinstance(part, Tensor) else part) * base
        return code

    def decode(self, codes: Tensor) -> np.ndarray:
        (time, high, wide), levels = self.config.stride, self.config.levels
        colours = []
        for base, count in zip(self.basis[:3], levels, strict=False):
            part = (codes.cpu() // base) % count
            colours.append((part * (255 / max(count - 1, 1))).round().to(torch.uint8))
        frames = torch.stack(colours, -1)
        frames = frames.repeat_interleave(high, 1).repeat_interleave(wide, 2)
        rest = frames[1:].repeat_interleave(time, 0)
        return torch.cat([frames[:1], rest]).numpy()
