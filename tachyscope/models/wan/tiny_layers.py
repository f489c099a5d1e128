"""Layers of TAEHV's layout, which decode latents chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.limits import Bound, within
from tachyscope.models.checkpoint import check_finite, fit, some
from tachyscope.models.diffusion import LatentSizes
from tachyscope.models.random_weights import random_module

RANDOM = "random-tiny"  # in place of a file: published sizes with random weights
TIME, SPACE = 4, 8  # frames, and rows and columns, of a latent position
WIDTHS = (256, 128, 64, 64)
CHANNELS = Bound(1, 4_096)  # of a layer
# Wan 2.1, by channel: a model's latents are the VAE's less the mean, divided by the deviation
MEAN = (-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
        0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921)  # fmt: skip
STD = (2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
       3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160)  # fmt: skip


class MemoryBlock(nn.Module):
    """Three convolutions over a frame and the one before, and a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            _conv(2 * width, width), nn.ReLU(), _conv(width, width), nn.ReLU(), _conv(width, width)
        )

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        return F.relu(self.conv(torch.cat([x, before], 1)) + x)


class Grow(nn.Module):
    """Each frame [F, C, h, w] as `times` frames."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.times = times
        self.conv = nn.Conv2d(width, times * width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # the layout upsamples first: before that a 1 by 1 convolution is the same for a quarter
        return self.conv(x).unflatten(1, (self.times, -1)).flatten(0, 1)


class Enlarge(nn.Conv2d):
    """A 3 by 3 convolution after nearest-neighbour upsampling by two.

    Upsampled neighbours are equal, so it is a transposed convolution of stride 2 with sums of its
    weights, at four ninths of the work.
    """

    summed: Tensor  # [in, out, 4, 4]

    def __init__(self, wide: int, out: int) -> None:
        super().__init__(wide, out, 3, padding=1, bias=False)

    def place(self) -> None:
        """Sum the weights, before they are rounded."""
        rows = ((0, 0, 1), (0, 1, 1), (1, 1, 0), (1, 0, 0))
        sums = torch.tensor(rows, dtype=torch.float64, device=self.weight.device)
        summed = torch.einsum("ka,ocab,lb->cokl", sums, self.weight.detach().double(), sums)
        self.register_buffer("summed", summed, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv_transpose2d(x, self.summed, stride=2, padding=1)


class TinyLayers(nn.Module):
    """The decoder's layers under their published names, `decoder.0` to `decoder.22`.

    `raw`: it decodes the VAE's own latents, not the model's normalised ones.
    """

    dtype: torch.dtype
    mean: Tensor  # [C, 1, 1]
    std: Tensor

    def __init__(
        self,
        channels: int = 16,
        widths: tuple[int, int, int, int] = WIDTHS,
        patch: int = 1,
        raw: bool = False,
    ) -> None:
        super().__init__()
        self.channels, self.widths, self.patch, self.raw = channels, widths, patch, raw
        # layers without weights, which `forward` or `Grow` computes, are identities here
        layers: list[nn.Module] = [nn.Identity(), _conv(channels, widths[0]), nn.ReLU()]
        for i, times in enumerate((1, 2, 2)):
            layers += [MemoryBlock(widths[i]) for _ in range(3)]
            layers += [nn.Identity(), Grow(widths[i], times)]
            layers += [Enlarge(widths[i], widths[i + 1])]
        self.decoder = nn.Sequential(*layers, nn.ReLU(), _conv(widths[3], 3 * patch**2))

    def place(self, device: torch.device | str, dtype: torch.dtype) -> Self:
        """The layers on a device, ready to run."""
        self.dtype = dtype
        for module in self.modules():
            if isinstance(module, Enlarge):
                module.place()
                last = torch.channels_last
                module.summed = module.summed.to(device, dtype).contiguous(memory_format=last)
        for weight in self.parameters():
            last = torch.channels_last if weight.dim() == 4 else torch.contiguous_format
            weight.data = weight.data.to(device, dtype).contiguous(memory_format=last)
        spread = (MEAN, STD) if self.raw else ((0.0,) * self.channels, (1.0,) * self.channels)
        for name, values in zip(("mean", "std"), spread, strict=True):
            x = torch.tensor(values, dtype=torch.float64, device=device).view(-1, 1, 1)
            self.register_buffer(name, x, persistent=False)
        return self.eval().requires_grad_(False)

    def empty_memory(self, latents: Tensor) -> list[Tensor]:
        """The memory before a video's first frame: zeros [1, C, h, w] for each memory block."""
        high, wide = latents.shape[-2:]
        kind: Any = {"dtype": self.dtype, "device": latents.device}
        return [
            torch.zeros(1, width, high << i, wide << i, **kind)
            for i, width in enumerate(self.widths[:3])
            for _ in range(3)
        ]

    def forward(self, latents: Tensor, memory: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Frames [4F, H, W, 3] as floats from 0 to 255, of latents [1, C, F, h, w].

        `memory` is each memory block's last input; the new memory is returned too.
        """
        x = latents[0].transpose(0, 1)
        x = x * self.std.to(x.dtype) + self.mean.to(x.dtype)
        x = (3 * torch.tanh(x / 3)).to(self.dtype)
        x = x.contiguous(memory_format=torch.channels_last)
        kept: list[Tensor] = []
        for layer in self.decoder:
            if isinstance(layer, MemoryBlock):
                before = torch.cat([memory[len(kept)], x[:-1]])
                kept.append(x[-1:].clone())
                x = layer(x, before)
            else:
                x = layer(x)
        if self.patch > 1:
            x = F.pixel_shuffle(x, self.patch)
        levels = 255 * x.to(torch.promote_types(x.dtype, torch.float32)).clamp(0, 1)
        return levels.permute(0, 2, 3, 1), kept


def read_layers(
    tensors: dict[str, Tensor], config: LatentSizes, where: str, raw: bool = False
) -> TinyLayers:
    """A decoder's layers from a file's tensors, for a model's latents; ignores an encoder's."""
    with torch.device("meta"):
        layers = infer_layers(tensors, where, raw)
    _check_model(layers, config, where)
    for key, module in layers.named_modules():
        if isinstance(module, Grow) and f"{key}.conv.weight" in tensors:
            # a file may hold more time steps than the layout has: it uses the last ones
            weight, wanted = tensors[f"{key}.conv.weight"], module.conv.out_channels
            if weight.dim() and weight.shape[0] % wanted == 0:
                tensors[f"{key}.conv.weight"] = weight[-wanted:]
    fit(layers, tensors, where, ignore=("encoder.",), assign=True)
    check_finite(layers, where)
    return layers


def infer_layers(tensors: Mapping[str, Tensor], where: str, raw: bool) -> TinyLayers:
    """Layers with the widths of a file's tensors."""
    try:
        first, channels = tensors["decoder.1.weight"].shape[:2]
        widths = tuple(tensors[f"decoder.{i}.weight"].shape[0] for i in (8, 14, 20))
        patch = math.isqrt(tensors["decoder.22.weight"].shape[0] // 3)
        if not all(within(CHANNELS, n) for n in (first, channels, *widths, patch)):
            raise ValueError
    except (KeyError, IndexError, ValueError):
        raise TachyscopeError(
            f"{where} must hold a tiny decoder of TAEHV's first layout, decoder.1 to decoder.22 of "
            f"at most {CHANNELS.high} channels, got {some(sorted(tensors)) or 'nothing'}: "
            f"give taew2_1 or lighttaew2_1"
        ) from None
    return TinyLayers(channels, cast(Any, (first, *widths)), patch, raw)


def random_layers(config: LatentSizes, device: torch.device | str) -> TinyLayers:
    """The published layers for a model's latents, with random weights."""
    with torch.device("meta"):
        layers = TinyLayers(config.in_channels, patch=max(1, config.stride[1] // SPACE))
    _check_model(layers, config, RANDOM)
    if torch.device(device).type == "meta":
        return layers
    return random_module(layers, 0, device, RANDOM, _scale)


def _scale(name: str, drawn: Tensor) -> None:
    last = name.startswith("decoder.22.")
    if name.endswith("bias"):
        drawn.mul_(0.1).add_(0.5 * last)  # about a middle grey
    else:
        # what a memory block adds is less than its input, so that nothing explodes
        gain = 0.1 if last or name.endswith("conv.4.weight") else 1.4
        drawn *= gain * drawn[0].numel() ** -0.5


def _check_model(layers: TinyLayers, config: LatentSizes, where: str) -> None:
    """Raise if a decoder is for other latents than the model's."""
    side = SPACE * layers.patch
    if layers.channels != config.in_channels or config.stride != (TIME, side, side):
        time, high, wide = config.stride
        raise TachyscopeError(
            f"{where} decodes latents of {layers.channels} channels to {TIME} frames of "
            f"{side}x{side} pixels a place, the model's have {config.in_channels} and become "
            f"{time} of {high}x{wide}: give a decoder of this model's latents"
        )
    if layers.raw and layers.channels != len(MEAN):
        raise TachyscopeError(
            f"{where} is given the VAE's latents, whose mean and deviation are known for "
            f"{len(MEAN)} channels, got {layers.channels}: give a decoder of the model's latents"
        )


def _conv(wide: int, out: int) -> nn.Conv2d:
    return nn.Conv2d(wide, out, 3, padding=1)
