"""The parts of a model that can be exchanged: text encoders and decoders."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor


class Controls(NamedTuple):
    """What steers latent frames beside the prompt; None where a model takes none such."""

    actions: Tensor | None = None  # [F] indices
    rays: Tensor | None = None  # [B, S, 8]


class TextEncoder(Protocol):
    """A prompt's embedding, as a part that can be exchanged."""

    kind: str

    def __call__(self, prompt: str) -> tuple[Tensor, int]:
        """The embedding [1, text_len, text_dim], zero after the prompt, and the prompt's length."""

    def write(self, folder: Path) -> None: ...


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
