"""A pass's controls beside the prompt, and the interface of text encoders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from tachyscope.models.wan.action_modules import ActionInputs
from tachyscope.models.wan.camera_rays import Injected


class Controls(NamedTuple):
    """Inputs of a pass beside latents and prompt; None for those that a model does not take."""

    actions: Tensor | None = None  # [F] indices
    # of each token the camera's position (x, y), the direction of the token's ray, and where that
    # meets a wall: [B, S, 8]
    rays: Tensor | None = None
    image: Tensor | None = None  # extra channels of the latents [B, C, F, h, w]
    injected: Injected | None = None  # scale and shift of each layer's stream
    added: Tensor | None = None  # added to the patch embeddings [1, S, W]
    inputs: ActionInputs | None = None  # of the action modules in the layers


class TextEncoder(Protocol):
    """Embeds prompts."""

    kind: str

    def __call__(self, prompt: str) -> tuple[Tensor, int]:
        """The embedding [1, text_len, text_dim], zero after the prompt, and the prompt's length."""

    def write(self, folder: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """Encoded prompts, one for each video; cross-attention fills no cache entries."""

    context: Tensor  # [videos, text_len, text_dim]
    tokens: tuple[int, ...]  # of each prompt, without padding
    lengths: tuple[int, ...] = ()
