"""Tiny decoders of TAEHV's layout, as taew2_1 and lighttaew2_1: latents to frames by chunks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tachyscope.errors import TachyscopeError, warn
from tachyscope.models.checkpoint import check_finite, fit, read_tensors, some, write_tensors
from tachyscope.models.wan.config import WanConfig
from tachyscope.models.wan.parts import Decoder

RANDOM = "random-tiny"  # instead of a file: the published shape, random weights
TIME, SPACE = 4, 8  # frames, and rows and columns of them, that a latent place becomes
TRIM = TIME - 1  # frames that a video's first latent frame leaves out
WIDTHS = (256, 128, 64, 64)
MOST = 4096  # channels of a layer
# Wan 2.1's latents by channel: the model's are the VAE's, less the mean, over the deviation
MEAN = (-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
        0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921)  # fmt: skip
STD = (2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
       3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160)  # fmt: skip
NAMES = ("taew2_1", "lighttaew2_1")  # the second is given the VAE's latents
# of a video whose two decoders are compared: the sum of squares, and of how many values
ERROR = "decoder_error"

Decode = Callable[[nn.Module, Tensor, list[Tensor], bool], tuple[Tensor, list[Tensor]]]


class MemoryBlock(nn.Module):
    """Three convolutions over a frame and the one before it, beside an identity."""

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
        # the layout enlarges first: a 1 by 1 convolution gives the same before it, at a quarter
        return self.conv(x).unflatten(1, (self.times, -1)).flatten(0, 1)


class Enlarge(nn.Conv2d):
    """A 3 by 3 convolution over frames that were first made twice as high and wide.

    Of the enlarged places that it covers, two at a time are one: so it is a transposed convolution
    of stride 2, whose weights are sums of its own, at four ninths of the work.
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

    `raw`: it was trained on the VAE's own latents, not on the model's.
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
        # layers without weights that `forward` or `Grow` computes are identities here
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
        """What stands before a video's first frame: zeros, [1, C, h, w] for each memory block."""
        high, wide = latents.shape[-2:]
        kind: Any = {"dtype": self.dtype, "device": latents.device}
        return [
            torch.zeros(1, width, high << i, wide << i, **kind)
            for i, width in enumerate(self.widths[:3])
            for _ in range(3)
        ]

    def forward(self, latents: Tensor, memory: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Levels [4F, H, W, 3], 0 to 255 and not rounded, of latents [1, C, F, h, w].

        `memory` is what each memory block was last given; what it is now is returned beside.
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


class TinyDecoder(Decoder):
    """A tiny decoder, streamed: what its memory blocks saw last is in the session's features.

    It only shows. What must be encoded is encoded by the VAE, which `vae` reads when it is first
    needed. With `check` that decodes every chunk too, and `decoder_note` tells how far they lie
    apart.
    """

    kind = "tiny_decoder"

    def __init__(
        self,
        layers: TinyLayers,
        name: str,
        vae: Callable[[], Decoder] | None = None,
        check: bool = False,
    ) -> None:
        self.layers, self.name, self.read_vae = layers, name, vae
        self.decode: Decode = _decode
        # read at once: its faults show before a video is begun
        self.reference = self.vae if check else None

    @classmethod
    def read(
        cls,
        path: Path | str,
        config: WanConfig,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        vae: Callable[[], Decoder] | None = None,
        check: bool = False,
    ) -> Self:
        """The decoder in a published file, or in a model's folder; or `random-tiny`.

        An encoder's tensors beside it are not read. Which latents it wants, its name tells alone:
        taew2_1 and lighttaew2_1 have the same tensors.
        """
        path = Path(path)
        if path.is_dir():
            files = [path / f"{name}.safetensors" for name in NAMES]
            path = next((file for file in files if file.is_file()), files[0])
        if str(path) == RANDOM:
            layers = random_layers(config, device).place(device, dtype)
            return cls(layers, f"{NAMES[0]} (random weights)", vae, check)
        tensors, where, name = read_tensors(path), str(path), path.stem.lower()
        if not name.startswith(("tae", "lighttae")):
            warn(
                f"{where}: its name does not tell which latents it wants; it is given the model's, "
                f"as taew2_1. If its colours are washed out, name it lighttaew2_1, and it is given "
                f"the VAE's"
            )
        with torch.device("meta"):
            layers = infer_layers(tensors, where, raw=name.startswith("lighttae"))
        _check_model(layers, config, where)
        for key, module in layers.named_modules():
            if isinstance(module, Grow) and f"{key}.conv.weight" in tensors:
                # a file may hold more time steps than the layout makes: the last ones are meant
                weight, wanted = tensors[f"{key}.conv.weight"], module.conv.out_channels
                if weight.dim() and weight.shape[0] % wanted == 0:
                    tensors[f"{key}.conv.weight"] = weight[-wanted:]
        fit(layers, tensors, where, ignore=("encoder.",), assign=True)
        layers.place(device, dtype)
        check_finite(layers, where)
        return cls(layers, path.stem, vae, check)

    def write(self, folder: Path) -> None:
        """Write the decoder under the name that tells which latents it wants."""
        write_tensors(folder / f"{NAMES[self.layers.raw]}.safetensors", self.layers.state_dict())

    def compile(self, backend: str = "inductor") -> Self:
        """The decoder as one program, for each number of latent frames that it is given."""
        self.decode = compiled(backend)
        return self

    @functools.cached_property
    def vae(self) -> Decoder:
        if self.read_vae is None:
            raise TachyscopeError(
                f"{self.name} is a tiny decoder, which only shows: to encode given frames, or to "
                f"check its own, put Wan2.1_VAE.pth beside the weights and pip install "
                f"tachyscope[hf]"
            )
        return self.read_vae()

    def pixel_frames(self, latents: int) -> int:
        return max(0, TIME * latents - TRIM)

    def encode(self, frames: np.ndarray | Tensor) -> Tensor:
        return self.vae.encode(frames)

    def skip(self, latents: Tensor, features: dict[str, Tensor]) -> None:
        self._stream(_decode, latents, features, rounded=False)
        if self.reference is not None:
            self.reference.skip(latents, features)

    def levels(self, latents: Tensor, features: dict[str, Tensor]) -> Tensor:
        levels = self._stream(_decode, latents, features, rounded=False)
        self._compare(levels.round(), latents, features)
        return levels

    def __call__(self, latents: Tensor, features: dict[str, Tensor]) -> np.ndarray:
        # a compiled program does not take tensors without data, which `fit` gives
        decode = _decode if latents.is_meta else self.decode
        shown = self._stream(decode, latents, features, rounded=True)
        self._compare(shown, latents, features)
        return shown.cpu().numpy()

    def _stream(
        self, decode: Decode, latents: Tensor, features: dict[str, Tensor], rounded: bool
    ) -> Tensor:
        """The next frames of a video; its features are brought up to date."""
        begun, memory = "tiny.0" in features, self.layers.empty_memory(latents)
        for i, empty in enumerate(memory):
            # a state that was saved has lost its strides
            held = features.get(f"tiny.{i}", empty)
            memory[i] = held.contiguous(memory_format=torch.channels_last)
        # together they fill a GPU; a CPU's kernels round otherwise for another number of frames
        parts = latents.split(1 if latents.device.type == "cpu" else latents.shape[2], 2)
        frames = []
        for part in parts:
            shown, memory = decode(self.layers, part, memory, rounded)
            frames.append(shown)
        features |= {f"tiny.{i}": x for i, x in enumerate(memory)}
        shown = frames[0] if len(frames) == 1 else torch.cat(frames)
        return shown if begun else shown[TRIM:]

    def _compare(self, shown: Tensor, latents: Tensor, features: dict[str, Tensor]) -> None:
        """Add up how far the frames lie from the VAE's, where that is asked for."""
        if self.reference is None:
            return
        theirs = torch.from_numpy(self.reference(latents, features))
        squares = (shown.cpu().double() - theirs).square().sum()
        total = features.get(ERROR, torch.zeros(2, dtype=torch.float64)).cpu()
        features[ERROR] = total + torch.stack([squares, squares.new_tensor(shown.numel())])


def decoder_note(features: Mapping[str, Tensor]) -> str | None:
    """How far the two decoders of a checked video lie apart, in a sentence."""
    if ERROR not in features:
        return None
    squares, count = features[ERROR].tolist()
    if not squares:
        return "the tiny decoder's frames equal those of Wan's VAE"
    psnr = 10 * math.log10(255**2 * count / squares)
    return (
        f"PSNR of the tiny decoder's frames to those of Wan's VAE: {psnr:.1f} dB, over all frames"
    )


def infer_layers(tensors: Mapping[str, Tensor], where: str, raw: bool) -> TinyLayers:
    """Layers of the widths that a file's shapes tell."""
    try:
        first, channels = tensors["decoder.1.weight"].shape[:2]
        widths = tuple(tensors[f"decoder.{i}.weight"].shape[0] for i in (8, 14, 20))
        patch = math.isqrt(tensors["decoder.22.weight"].shape[0] // 3)
        if not all(0 < n <= MOST for n in (first, channels, *widths, patch)):
            raise ValueError
    except (KeyError, IndexError, ValueError):
        raise TachyscopeError(
            f"{where} must hold a tiny decoder of TAEHV's first layout, decoder.1 to decoder.22 of "
            f"at most {MOST} channels, got {some(sorted(tensors)) or 'nothing'}: give taew2_1 or "
            f"lighttaew2_1"
        ) from None
    return TinyLayers(channels, cast(Any, (first, *widths)), patch, raw)


def random_layers(config: WanConfig, device: torch.device | str) -> TinyLayers:
    """The published layers for a model's latents, of random weights: for a clock."""
    with torch.device("meta"):
        layers = TinyLayers(config.in_channels)
    _check_model(layers, config, RANDOM)
    layers.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    for name, weight in layers.named_parameters():
        drawn = torch.randn(weight.shape, generator=generator, device=device, dtype=torch.float32)
        last = name.startswith("decoder.22.")
        if name.endswith("bias"):
            drawn = 0.1 * drawn + 0.5 * last  # about a middle grey
        else:
            # what a memory block adds is less than what it is given, so that nothing explodes
            gain = 0.1 if last or name.endswith("conv.4.weight") else 1.4
            drawn *= gain * drawn[0].numel() ** -0.5
        weight.data.copy_(drawn)
    return layers


def _check_model(layers: TinyLayers, config: WanConfig, where: str) -> None:
    """Raise where a decoder is for other latents than the model's."""
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


@functools.cache
def compiled(backend: str) -> Decode:
    """`_decode` compiled, a program for every shape it meets; decoders share them."""
    return cast(Decode, torch.compile(_decode, dynamic=False, fullgraph=True, backend=backend))


def _decode(
    layers: nn.Module, latents: Tensor, memory: list[Tensor], rounded: bool
) -> tuple[Tensor, list[Tensor]]:
    """Frames [4F, H, W, 3] as levels or as uint8, and the memory behind them."""
    levels, kept = layers(latents, memory)
    return levels.round().to(torch.uint8) if rounded else levels, kept


def _conv(wide: int, out: int) -> nn.Conv2d:
    return nn.Conv2d(wide, out, 3, padding=1)
