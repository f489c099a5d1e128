"""Tiny decoders of TAEHV's layout, such as taew2_1 and lighttaew2_1."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self, cast

import numpy as np
import torch
from torch import Tensor, nn

from tachyscope.core.errors import TachyscopeError, warn
from tachyscope.models.checkpoint import read_tensors, write_tensors
from tachyscope.models.diffusion import Decoder
from tachyscope.models.wan.config import WanConfig
from tachyscope.models.wan.sizes import VaeSize
from tachyscope.models.wan.tiny_layers import RANDOM, TIME, TinyLayers, random_layers, read_layers

TRIM = TIME - 1  # frames of a video's first latent frame that are dropped
NAMES = ("taew2_1", "lighttaew2_1")  # the second decodes the VAE's own latents
# the sum of squared differences of two decoders, and the number of values
ERROR = "decoder_error"

Decode = Callable[[nn.Module, Tensor, list[Tensor], bool], tuple[Tensor, list[Tensor]]]


class TinyDecoder(Decoder):
    """A streaming tiny decoder; its memory blocks' state is in the session's features.

    It cannot encode: that is done by the VAE, which `vae` reads when it is first needed. With
    `check` the VAE decodes every chunk too, and `decoder_note` states the difference. A video's
    first latent frame is decoded `warm` times before it is shown: right after zeros it is blurred.
    """

    kind = "tiny_decoder"
    trim = TRIM

    def __init__(
        self,
        layers: TinyLayers,
        name: str,
        vae: Callable[[], Decoder] | None = None,
        check: bool = False,
        warm: int = 0,
    ) -> None:
        self.layers, self.name, self.read_vae, self.warm = layers, name, vae, warm
        self.decode: Decode = _decode
        # read now, so that its faults show before a video begins
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
        """The decoder in a published file or a model's folder, or `random-tiny`.

        An encoder in the file is ignored. Only the file's name says which latents it decodes:
        taew2_1 and lighttaew2_1 have tensors of the same shapes.
        """
        path, warm = Path(path), int(config.image == "held")
        if path.is_dir():
            files = [path / f"{name}.safetensors" for name in NAMES]
            path = next((file for file in files if file.is_file()), files[0])
        if str(path) == RANDOM:
            layers = random_layers(config, device).place(device, dtype)
            return cls(layers, f"{NAMES[0]} (random weights)", vae, check, warm)
        tensors, where, name = read_tensors(path), str(path), path.stem.lower()
        if not name.startswith(("tae", "lighttae")):
            warn(
                f"{where}: its name does not tell which latents it wants; it is given the model's, "
                f"as taew2_1. If its colours are washed out, name it lighttaew2_1, and it is given "
                f"the VAE's"
            )
        layers = read_layers(tensors, config, where, raw=name.startswith("lighttae"))
        layers.place(device, dtype)
        return cls(layers, path.stem, vae, check, warm)

    def write(self, folder: Path) -> None:
        """Write the decoder under the name that says which latents it decodes."""
        write_tensors(folder / f"{NAMES[self.layers.raw]}.safetensors", self.layers.state_dict())

    def compile(self, backend: str = "inductor") -> Self:
        """Compile the decoder, for each number of latent frames."""
        self.decode = compiled(backend)
        return self

    @functools.cached_property
    def vae(self) -> Decoder:
        if self.read_vae is None:
            raise TachyscopeError(
                f"{self.name} is a tiny decoder, which only shows: to encode given frames, or to "
                f"check its own, put Wan2.1_VAE.pth beside the weights and pip install "
                f"-e '.[hf]'"
            )
        return self.read_vae()

    def pixel_frames(self, latents: int) -> int:
        return max(0, TIME * latents - self.trim)

    def encode(self, frames: np.ndarray | Tensor) -> Tensor:
        return self.vae.encode(frames)

    def encoder_state(self, size: tuple[int, int]) -> int:
        # Wan's VAE encodes, and is not read for this
        return VaeSize(self.layers.channels, self.layers.dtype).encoder_state(size)

    def encode_next(self, frames: np.ndarray, state: dict[str, Tensor]) -> Tensor:
        return self.vae.encode_next(frames, state)

    def skip(self, latents: Tensor, features: dict[str, Tensor]) -> None:
        self._stream(_decode, latents, features, rounded=False)
        if self.reference is not None:
            self.reference.skip(latents, features)

    def levels(self, latents: Tensor, features: dict[str, Tensor]) -> Tensor:
        levels = self._stream(_decode, latents, features, rounded=False)
        self._compare(levels.round(), latents, features)
        return levels

    def __call__(self, latents: Tensor, features: dict[str, Tensor]) -> np.ndarray:
        # compiled programs take no tensors without data, as `fit` measures with
        decode = _decode if latents.is_meta else self.decode
        shown = self._stream(decode, latents, features, rounded=True)
        self._compare(shown, latents, features)
        return shown.cpu().numpy()

    def _stream(
        self, decode: Decode, latents: Tensor, features: dict[str, Tensor], rounded: bool
    ) -> Tensor:
        """The next frames of a video; updates its features."""
        begun, memory = "tiny.0" in features, self.layers.empty_memory(latents)
        for i, empty in enumerate(memory):
            # a restored state has lost its strides
            held = features.get(f"tiny.{i}", empty)
            memory[i] = held.contiguous(memory_format=torch.channels_last)
        for _ in range(0 if begun else self.warm):
            _, memory = _decode(self.layers, latents[:, :, :1], memory, rounded)
        # a GPU decodes them together; on a CPU rounding depends on the number of frames
        parts = latents.split(1 if latents.device.type == "cpu" else latents.shape[2], 2)
        frames = []
        for part in parts:
            shown, memory = decode(self.layers, part, memory, rounded)
            frames.append(shown)
        features |= {f"tiny.{i}": x for i, x in enumerate(memory)}
        shown = frames[0] if len(frames) == 1 else torch.cat(frames)
        return shown if begun else shown[self.trim :]

    def _compare(self, shown: Tensor, latents: Tensor, features: dict[str, Tensor]) -> None:
        """Add the squared differences to the VAE's frames, if they are checked."""
        if self.reference is None:
            return
        theirs = torch.from_numpy(self.reference(latents, features))
        squares = (shown.cpu().double() - theirs).square().sum()
        total = features.get(ERROR, torch.zeros(2, dtype=torch.float64)).cpu()
        features[ERROR] = total + torch.stack([squares, squares.new_tensor(shown.numel())])


def decoder_note(features: Mapping[str, Tensor]) -> str | None:
    """The PSNR between the two decoders of a checked video, in a sentence."""
    if ERROR not in features:
        return None
    squares, count = features[ERROR].tolist()
    if not squares:
        return "the tiny decoder's frames equal those of Wan's VAE"
    psnr = 10 * math.log10(255**2 * count / squares)
    return (
        f"PSNR of the tiny decoder's frames to those of Wan's VAE: {psnr:.1f} dB, over all frames"
    )


@functools.cache
def compiled(backend: str) -> Decode:
    """`_decode` compiled for each shape it is called with; decoders share it."""
    return cast(Decode, torch.compile(_decode, dynamic=False, fullgraph=True, backend=backend))


def _decode(
    layers: nn.Module, latents: Tensor, memory: list[Tensor], rounded: bool
) -> tuple[Tensor, list[Tensor]]:
    """Frames [4F, H, W, 3] as levels or as uint8, and the memory behind them."""
    levels, kept = layers(latents, memory)
    return levels.round().to(torch.uint8) if rounded else levels, kept
