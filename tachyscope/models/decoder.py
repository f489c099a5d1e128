"""Decoders, which turn a diffusion model's latents into frames: a part that can be exchanged."""

from __future__ import annotations

import abc
import copy
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

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
