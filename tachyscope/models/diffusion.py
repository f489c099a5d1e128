"""What diffusion models share: decoders, noise, and embeddings of timesteps."""

from __future__ import annotations

import abc
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.session import Session
from tachyscope.core.types import Shape
from tachyscope.memory.allocations import peak, tensor_bytes
from tachyscope.models.base import VideoModel

P = TypeVar("P")


class LatentSizes(Protocol):
    """What a decoder must know of a model's latents."""

    @property
    def in_channels(self) -> int: ...

    @property
    def stride(self) -> tuple[int, int, int]:
        """Pixel frames, rows and columns that a latent place becomes."""


class Decoder(abc.ABC):
    """Decodes latents chunk by chunk; what it keeps between chunks is the caller's `features`."""

    kind: str
    name: str  # for people

    @abc.abstractmethod
    def pixel_frames(self, latents: int) -> int:
        """The frames that a video's first `latents` latent frames decode to."""

    @abc.abstractmethod
    def encode(self, frames: np.ndarray | Tensor) -> Tensor:
        """Latents [1, C, F, h, w] of frames uint8 [F, H, W, 3], or of `levels` of that shape.

        Raises if this decoder has no encoder.
        """

    def encode_next(self, frames: np.ndarray, state: dict[str, Tensor]) -> Tensor:
        """Latents of the next frames of a video, whose encoder state is updated.

        By default every call is encoded by itself.
        """
        return self.encode(frames)

    def encoder_state(self, size: tuple[int, int]) -> int:
        """Bytes of `encode_next`'s state for frames of this size, of a decoder on the meta device.

        0 if it keeps none.
        """
        return 0

    def skip(self, latents: Tensor, features: dict[str, Tensor]) -> None:
        """Update the state by latents whose frames are not wanted; nothing without a state."""
        return None

    @abc.abstractmethod
    def levels(self, latents: Tensor, features: dict[str, Tensor]) -> Tensor:
        """The decoded frames as floats from 0 to 255, not yet rounded: [F, H, W, 3]."""

    def __call__(self, latents: Tensor, features: dict[str, Tensor]) -> np.ndarray:
        """Frames uint8 [F, H, W, 3] of latents [1, C, F, h, w]; updates a video's `features`."""
        return self.levels(latents, features).round().to(torch.uint8).cpu().numpy()

    @abc.abstractmethod
    def write(self, folder: Path) -> None:
        """Save it in a model's folder."""


def modules_of(part: object) -> list[nn.Module]:
    """The modules that a decoder holds."""
    return [] if part is None else [x for x in vars(part).values() if isinstance(x, nn.Module)]


def on_meta(part: P) -> P:
    """A copy of a decoder whose tensors are on the meta device."""
    held = [x for module in modules_of(part) for x in (*module.parameters(), *module.buffers())]
    # not copied first, which would take their memory again
    return copy.deepcopy(part, {id(x): _shape_of(x) for x in held})


def _shape_of(x: Tensor) -> Tensor:
    """A parameter or buffer without data."""
    shape = x.detach().to("meta")
    return nn.Parameter(shape, requires_grad=False) if isinstance(x, nn.Parameter) else shape


class DecodingMemory(NamedTuple):
    """Bytes that a decoder takes."""

    weights: int
    state: int  # kept of a video between chunks
    chunk: int  # beside these, while a chunk is decoded
    one: int  # while one latent frame is


class DiffusionModel(VideoModel):
    """A model that denoises a chunk's latents [B, C, F, h, w], and its decoder, if it has one.

    Latents are in float32 or wider.
    """

    frame_dim = 2

    def __init__(self, name: str, transformer: nn.Module, decoder: Decoder | None) -> None:
        self.name, self.transformer, self.decoder = name, transformer, decoder
        weight = next(transformer.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self.latent_dtype = torch.promote_types(self.dtype, torch.float32)
        self.revisions: dict[str, str] = {}  # commits of repositories that it was downloaded from
        self._times: dict[float, Tensor] = {}

    @property
    @abc.abstractmethod
    def decoder_files(self) -> str:
        """Which published decoder to put where, for the error without one."""

    @abc.abstractmethod
    def make_transformer(self) -> nn.Module:
        """A transformer of the model's configuration and dtype, on torch's default device."""

    @abc.abstractmethod
    def timestep_embedding(self, timestep: float) -> Tensor:
        """The embedding [W] of a timestep from 0 to 1000, on the device."""

    def embed_time(self, timestep: float) -> Tensor:
        """`timestep_embedding` in host memory, computed once for each timestep."""
        if timestep not in self._times:
            self._times[timestep] = self.timestep_embedding(timestep).cpu()
        return self._times[timestep]

    def on_meta(self) -> Self:
        clone = copy.copy(self)
        clone.device = torch.device("meta")
        clone.decoder = on_meta(self.decoder)
        with clone.device:  # made again: a copy would first take the weights' memory twice
            clone.transformer = self.make_transformer()
        return clone

    @property
    def decoder_name(self) -> str:
        return self.decoder.name if self.decoder else ""

    def require_decoder(self) -> Decoder:
        """The decoder; raises if the model was loaded without one."""
        if self.decoder is None:
            raise TachyscopeError(
                f"{self.name} was loaded without a decoder, got latents to show or frames to "
                f"encode: put {self.decoder_files}"
            )
        return self.decoder

    @torch.no_grad()
    def encode_frames(self, frames: np.ndarray) -> Tensor:
        self.shape((frames.shape[1], frames.shape[2]))  # raises if the size does not fit
        return self.require_decoder().encode(frames).to(self.device, self.latent_dtype)

    @torch.no_grad()
    def decode_latents(self, session: Session, latents: Tensor, video: int = 0) -> np.ndarray:
        return self.require_decoder()(latents, session.memory.features.decoder(video))

    def skip_decoding(self, session: Session, latents: Tensor) -> None:
        """Update the decoder's state of every video by latents that are not shown."""
        if self.decoder is not None:
            for video, part in enumerate(latents.split(1)):
                self.decoder.skip(part, session.memory.features.decoder(video))

    def decoding_memory(self, latents: Tensor, chunk: int) -> DecodingMemory:
        """What decoding latents on the meta device takes, `chunk` frames at a time."""
        features: dict[str, Tensor] = {}
        most, one, decoder = 0, 0, self.decoder
        if decoder is None:
            return DecodingMemory(0, 0, 0, 0)
        for _ in range(2):  # the first chunk has no state before it
            before = tensor_bytes(features.values())
            taken = peak(lambda: decoder(latents[:1, :, :chunk], features))
            most = max(most, taken + before - tensor_bytes(features.values()))
            one = max(one, peak(lambda: decoder(latents[:1, :, :1], features)))
        weights = sum(tensor_bytes(module.parameters()) for module in modules_of(decoder))
        return DecodingMemory(weights, tensor_bytes(features.values()), most, one)

    def noise(self, session: Session, draw: int, ahead: int = 0) -> Tensor:
        """Noise [B, C, F, h, w] of a chunk, the one being made or the `ahead`-th after it.

        Its `draw`-th noise is the caller's, if one was given; otherwise it is drawn.
        """
        given = session.memory.given_noise(draw, ahead)
        if given is None:
            return self._draw_noise(session.shape, session.memory.generators)
        return given.to(self.device, self.latent_dtype)

    def _draw_noise(self, shape: Shape, generators: Sequence[torch.Generator]) -> Tensor:
        batch, *size = self.latent_size(shape, shape.chunk)
        size = [batch // len(generators), *size]
        # always in float32, so that every dtype rounds the same noise
        drawn = [
            torch.randn(size, generator=each, dtype=torch.float32, device=self.device)
            for each in generators
        ]
        return torch.cat(drawn).to(self.latent_dtype)
