"""The parts of a model that can be exchanged: text encoders and decoders."""

from __future__ import annotations

import abc
import copy
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from tachyscope.models.wan.camera_rays import Injected
from tachyscope.models.wan.moves import Moves

P = TypeVar("P")


class Controls(NamedTuple):
    """What steers latent frames beside the prompt; None where a model takes none such."""

    actions: Tensor | None = None  # [F] indices
    # where the camera stands (x, y), the direction in which each token lies and the point of the
    # walls that lies there [B, S, 8]
    rays: Tensor | None = None
    image: Tensor | None = None  # channels beside the latents' [B, C, F, h, w]
    injected: Injected | None = None  # what each layer's stream is multiplied by, and added to it
    added: Tensor | None = None  # what the patches gain [1, S, W]
    moves: Moves | None = None  # what keyboard and mouse tell the layers


class TextEncoder(Protocol):
    """A prompt's embedding, as a part that can be exchanged."""

    kind: str

    def __call__(self, prompt: str) -> tuple[Tensor, int]:
        """The embedding [1, text_len, text_dim], zero after the prompt, and the prompt's length."""

    def write(self, folder: Path) -> None: ...


class LatentSizes(Protocol):
    """What a decoder must know of a model's latents."""

    @property
    def in_channels(self) -> int: ...

    @property
    def stride(self) -> tuple[int, int, int]:
        """Frames, rows and columns of pixels that a latent place becomes."""


class Decoder(abc.ABC):
    """From latents to pictures, as a part that can be exchanged."""

    kind: str
    name: str  # for people

    @abc.abstractmethod
    def pixel_frames(self, latents: int) -> int:
        """Frames that so many latent ones from the video's start become."""

    @abc.abstractmethod
    def encode(self, frames: np.ndarray | Tensor) -> Tensor:
        """Latents [1, C, F, h, w] of frames uint8 [F, H, W, 3], or of such `levels`.

        Raises where there is no way.
        """

    def encode_next(self, frames: np.ndarray, state: dict[str, Tensor]) -> Tensor:
        """Latents of a video's next frames; `state` lasts for a video.

        As many frames as so many latent ones become there. Here each is encoded by itself.
        """
        return self.encode(frames)

    def encoder_state(self, size: tuple[int, int]) -> int:
        """Bytes that `encode_next` keeps of frames of that size, of a part on the meta device."""
        return 0

    def skip(self, latents: Tensor, features: dict[str, Tensor]) -> None:
        """Take in latents that are not shown, where what follows depends on them."""
        return None

    @abc.abstractmethod
    def levels(self, latents: Tensor, features: dict[str, Tensor]) -> Tensor:
        """The frames before they are rounded: 0 to 255 as floats."""

    def __call__(self, latents: Tensor, features: dict[str, Tensor]) -> np.ndarray:
        """Frames uint8 [F, H, W, 3] of latents [1, C, F, h, w]; `features` lasts for a video."""
        return self.levels(latents, features).round().to(torch.uint8).cpu().numpy()

    @abc.abstractmethod
    def write(self, folder: Path) -> None:
        """Put it into a model's folder."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """Encoded prompts, one a video: they fill no cache entries, so `lengths` is empty."""

    context: Tensor  # [videos, text_len, text_dim]
    tokens: tuple[int, ...]  # of each, those that are not padding
    lengths: tuple[int, ...] = ()


def modules_of(part: object) -> list[nn.Module]:
    """The modules that a decoder holds."""
    return [] if part is None else [x for x in vars(part).values() if isinstance(x, nn.Module)]


def on_meta(part: P) -> P:
    """A copy of a decoder whose tensors are shapes alone."""
    held = [x for module in modules_of(part) for x in (*module.parameters(), *module.buffers())]
    # not copied first, which would take their memory again
    return copy.deepcopy(part, {id(x): _shape_of(x) for x in held})


def _shape_of(x: Tensor) -> Tensor:
    """A parameter or buffer without data."""
    shape = x.detach().to("meta")
    return nn.Parameter(shape, requires_grad=False) if isinstance(x, nn.Parameter) else shape
