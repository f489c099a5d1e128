"""LPIPS (arXiv 1801.03924): a perceptual distance of two pictures by AlexNet's features.

Version 0.1 of its authors, `lpips.LPIPS(net="alex")`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tachyscope.core.errors import TachyscopeError
from tachyscope.io.torch_defaults import no_autocast
from tachyscope.measure.metrics.weights import LPIPS, with_weights
from tachyscope.measure.quality import Frames, Values, check_frames

# of AlexNet's convolutions: channels in and out, kernel, stride, padding; and pooling before it
LAYERS = (
    (3, 64, 11, 4, 2, False),
    (64, 192, 5, 1, 2, True),
    (192, 384, 3, 1, 1, True),
    (384, 256, 3, 1, 1, False),
    (256, 256, 3, 1, 1, False),
)
# colours from -1 to 1, as the network was trained on them
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
EPSILON = 1e-10
SHORTEST_SIDE = 64  # pixels, the size of the pictures on which the weights were fitted
BATCH = 8  # frames at a time: at 480x832 their features take 0.2 GB


class Lpips(nn.Module):
    """AlexNet's convolutions, and a weight for each channel's difference."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(channels, out, kernel, stride, padding)
            for channels, out, kernel, stride, padding, _ in LAYERS
        )
        self.heads = nn.ModuleList(nn.Conv2d(out, 1, 1, bias=False) for _, out, *_ in LAYERS)

    @classmethod
    def load(cls, folder: Path | None = None, device: torch.device | str = "cpu") -> Self:
        """With the published weights, from a folder or the user's cache."""
        return with_weights(cls(), LPIPS, folder, device)

    @torch.inference_mode()
    def forward(self, a: Frames, b: Frames) -> Values:
        """LPIPS of each frame [F], for frames uint8 [F, H, W, 3]: 0 where they are equal."""
        for frames in (a, b):
            check_frames(frames)
        if a.shape != b.shape:
            raise TachyscopeError(
                f"LPIPS compares frames of one shape, got {list(a.shape)} and {list(b.shape)}: "
                f"compare videos of one length and size"
            )
        if min(a.shape[1:3]) < SHORTEST_SIDE:
            raise TachyscopeError(
                f"LPIPS needs frames of {SHORTEST_SIDE} x {SHORTEST_SIDE} pixels, got "
                f"{a.shape[1]} x {a.shape[2]}: leave it out"
            )
        starts = range(0, len(a), BATCH)
        with no_autocast():
            parts = [self._distance(a[i : i + BATCH], b[i : i + BATCH]) for i in starts]
        return np.asarray(torch.cat(parts).double().cpu())

    def _distance(self, a: Frames, b: Frames) -> Tensor:
        count = len(a)
        total = 0
        features = self._features(np.concatenate([a, b]))
        for seen, head in zip(features, self.heads, strict=True):
            difference = head((seen[:count] - seen[count:]).square())
            total = total + difference.mean((1, 2, 3))
        return torch.as_tensor(total)

    def _features(self, frames: Frames) -> list[Tensor]:
        """Each layer's features [F, C, H', W'], normalised over the channels."""
        device = next(self.parameters()).device
        x = torch.from_numpy(frames).to(device).permute(0, 3, 1, 2).float() / 127.5 - 1
        shift, scale = (torch.tensor(v, device=device)[:, None, None] for v in (SHIFT, SCALE))
        x, out = (x - shift) / scale, []
        for (*_, pooled), layer in zip(LAYERS, self.convolutions, strict=True):
            x = F.max_pool2d(x, 3, 2) if pooled else x
            x = layer(x).relu()
            out.append(x / (x.square().sum(1, keepdim=True).sqrt() + EPSILON))
        return out
