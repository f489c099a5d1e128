"""The parts of a model that can be exchanged: text encoders and decoders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from tachyscope.models.wan.camera_rays import Injected
from tachyscope.models.wan.moves import Moves


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


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """Encoded prompts, one a video: they fill no cache entries, so `lengths` is empty."""

    context: Tensor  # [videos, text_len, text_dim]
    tokens: tuple[int, ...]  # of each, those that are not padding
    lengths: tuple[int, ...] = ()
