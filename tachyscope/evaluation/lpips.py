"""LPIPS: how differently two pictures look to AlexNet, by torchmetrics' weights of its layers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from tachyscope.errors import TachyscopeError
from tachyscope.models.checkpoint import read_tensors
from tachyscope.quality import Frames, Values, check_frames

# of AlexNet's convolutions: number in torchvision's `features`, channels in and out, kernel,
# stride, padding, and whether pooling goes before
LAYERS = (
    (0, 3, 64, 11, 4, 2, False),
    (3, 64, 192, 5, 1, 2, True),
    (6, 192, 384, 3, 1, 1, True),
    (8, 384, 256, 3, 1, 1, False),
    (10, 256, 256, 3, 1, 1, False),
)
# pictures from -1 to 1 as the network was trained on them
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
LEAST = 64  # pixels of a side


class Lpips(nn.Module):
    """LPIPS of pictures, with AlexNet's weights from a file, as torchvision publishes them.

    The weights by which its layers are compared come with torchmetrics.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        spec = find_spec("torchmetrics")
        if spec is None or spec.origin is None:
            raise TachyscopeError(
                "LPIPS is measured by torchmetrics' weights: pip install tachyscope[eval]"
            )
        tensors = read_tensors(path)
        self.convolutions = nn.ModuleList()
        for number, wide, out, kernel, stride, padding, _ in LAYERS:
            layer = nn.Conv2d(wide, out, kernel, stride, padding)
            for name, parameter in layer.named_parameters():
                key = f"features.{number}.{name}"
                tensor = tensors.get(key)
                if tensor is None or tensor.shape != parameter.shape:
                    shape = "none" if tensor is None else list(tensor.shape)
                    raise TachyscopeError(
                        f"{path} is no AlexNet: {key} must be {list(parameter.shape)}, got "
                        f"{shape}: give torchvision's alexnet weights"
                    )
                parameter.data = tensor.float()
            self.convolutions.append(layer)
        heads = Path(spec.origin).parent / "functional" / "image" / "lpips_models" / "alex.pth"
        weights = torch.load(heads, map_location="cpu", weights_only=True)
        self.heads = [weights[f"lin{i}.model.1.weight"] for i in range(len(LAYERS))]

    @torch.inference_mode()
    def forward(self, a: Frames, b: Frames) -> Values:
        """LPIPS of each frame [F], for frames uint8 [F, H, W, 3]: 0 where they are equal."""
        for frames in (a, b):
            check_frames(frames)
            if min(frames.shape[1:3]) < LEAST:
                raise TachyscopeError(
                    f"LPIPS needs frames of {LEAST} x {LEAST} pixels, got {frames.shape[1]} x "
                    f"{frames.shape[2]}: leave it out"
                )
        sums = torch.zeros(len(a))
        pairs = zip(self._features(a), self._features(b), self.heads, strict=True)
        for ours, theirs, head in pairs:
            difference = torch.nn.functional.conv2d((ours - theirs).square(), head)
            sums += difference.mean((1, 2, 3))
        return np.asarray(sums.double())

    def _features(self, frames: Frames) -> list[Tensor]:
        """What each layer sees, of length one at every place."""
        shift, scale = (torch.tensor(x)[:, None, None] for x in (SHIFT, SCALE))
        x = torch.from_numpy(frames.copy()).permute(0, 3, 1, 2).float() / 127.5 - 1
        x, out = (x - shift) / scale, []
        for (*_, pooled), layer in zip(LAYERS, self.convolutions, strict=True):
            x = torch.nn.functional.max_pool2d(x, 3, 2) if pooled else x
            x = layer(x).relu()
            out.append(x / (1e-8 + x.square().sum(1, keepdim=True)).sqrt())
        return out
