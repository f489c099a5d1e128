"""What a stream needs of a model. Models know the session, no method."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from tachyscope.decode import DecodeEngine, DecodeParts, DraftEngine
from tachyscope.errors import TachyscopeError
from tachyscope.fingerprint import digest, of_tensors
from tachyscope.session import Session
from tachyscope.types import Rope, Shape, SliceableMlp

Ready = Callable[[Tensor], None]  # is handed final latents before the cache is written


class MemoryParts(NamedTuple):
    """Bytes that hang on a model and its size, and on no plan."""

    weights: int
    decoder: int  # its weights
    decoder_state: int  # what it keeps of a video between chunks
    prompt: int  # keys and values of cross-attention
    activations: int  # of a pass, attention left out
    decoding: int


class VideoModel(abc.ABC):
    """A model, frozen: all that changes during a video lives in the session."""

    name: str
    transformer: nn.Module
    kind: str  # "chunks", "tokens" or "rolling": which named plans are meant
    device: torch.device
    dtype: torch.dtype
    fps: int
    size: tuple[int, int]  # (height, width) in pixels of the frames it makes unless asked otherwise
    actions: str  # one letter an action, "" where the model takes none; the first is "stay"
    stock: str  # the plan its authors run
    frame_dim: int  # which dimension of latents counts frames
    calibration: Path | None = None  # of `tachyscope calibrate`, where it lies beside the weights
    camera: bool = False  # whether it is told where its camera stands
    compiled: bool = False  # whether a token's step is a native program, on a CPU
    # how often noise is drawn for a chunk; 0 where it cannot be handed in instead
    draws: int = 0

    @classmethod
    def narrow(cls, model: Any, fault: str) -> Self:
        """The model as one of this family; raises with `fault` where it is none."""
        if not isinstance(model, cls):
            raise TachyscopeError(fault)
        return model

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of the weights; worked out when first asked for."""
        return of_tensors(self.transformer.state_dict())

    def check_pace(self, pace: float) -> None:
        """Raise where a model without a camera is asked for another pace than 1."""
        if pace != 1 and not self.camera:
            raise TachyscopeError(
                f"{self.name} is not told where its camera stands, got `pace` {pace}: leave it out"
            )

    def prompt_key(self, prompt: str) -> str:
        """A hash by which a state knows its prompt."""
        return digest(prompt)

    @property
    def mlps(self) -> Sequence[SliceableMlp]:
        """The MLPs that the session is handed, by layer; none where they cannot be sliced."""
        return ()

    @abc.abstractmethod
    def shape(self, size: tuple[int, int] | None = None) -> Shape:
        """The shape at a size in pixels (height, width), or at the model's own."""

    @abc.abstractmethod
    def latent_size(self, shape: Shape, frames: int) -> tuple[int, ...]:
        """The shape of the tensor that holds so many latent frames."""

    def check_latents(self, shape: Shape, latents: Any) -> None:
        """Raise where given latents are not such as `sample` returns."""
        if not isinstance(latents, Tensor) or latents.dim() <= self.frame_dim:
            raise TachyscopeError(
                f"latents must be a tensor as a session's latents are, got a "
                f"{type(latents).__name__}: take session.latents"
            )
        size = self.latent_size(shape, latents.shape[self.frame_dim])
        numbers = "whole numbers" if shape.token_by_token else "floats"
        if (
            0 in latents.shape
            or tuple(latents.shape) != size
            or latents.is_floating_point() == shape.token_by_token
        ):
            raise TachyscopeError(
                f"latents must be {numbers} {list(size)}, got {latents.dtype} "
                f"{list(latents.shape)}: take session.latents"
            )
        if latents.is_floating_point() and not latents.isfinite().all():
            raise TachyscopeError("latents must be finite, these have NaN or infinity: mend them")

    @abc.abstractmethod
    def rope(self, shape: Shape) -> Rope:
        """How queries and keys turn with (t, y, x)."""

    @abc.abstractmethod
    def pixel_frames(self, latents: int) -> int:
        """Pixel frames that this many latent frames decode to."""

    @abc.abstractmethod
    def encode_prompt(self, prompt: str) -> Any:
        """The prompt as `prefill_prompt` takes it; `lengths`: cache entries a row of it fills."""

    @abc.abstractmethod
    def join_prompts(self, prompts: Sequence[Any]) -> Any:
        """Encoded prompts, one a video of a batch, as `prefill_prompt` takes them."""

    @abc.abstractmethod
    def prefill_prompt(self, session: Session, prompt: Any) -> None:
        """Hand the prompt to the session: cross-attention's keys and values, or one prefill."""

    @abc.abstractmethod
    def sample(
        self,
        session: Session,
        actions: Sequence[int] | Tensor,
        ready: Ready | None = None,
    ) -> Tensor:
        """The next chunk's clean latents; its last pass leaves clean keys and values in now.

        One action a latent frame, or what `actions_tensor` made of them. `ready` is handed the
        latents once they are final, before a pass that only leaves keys and values.
        """

    def decode_parts(self) -> DecodeParts | None:
        """What the decode engine takes of a token model; None where there is no such form."""
        return None

    def sample_by(
        self, engine: DecodeEngine | DraftEngine, session: Session, actions: Sequence[int] | Tensor
    ) -> Tensor:
        """`sample`, token after token by the decode engine."""
        raise NotImplementedError

    def actions_tensor(self, actions: Sequence[int] | Tensor, frames: int) -> Tensor | None:
        """Actions of so many latent frames as numbers of the device, which are read when the work
        is done; None where the model takes no actions, or not so."""
        return None

    @property
    def overlaps_decode(self) -> bool:
        """Whether a chunk can be decoded while the next one is sampled."""
        return True

    @property
    def graph_capturable(self) -> bool:
        """Whether chunks do the same work once the cache is full."""
        return True

    def switch_prompt(self, session: Session, held: Sequence[Tensor]) -> Tensor | None:
        """Make room for a new prompt's KV; the latents to prefill in one pass under that prompt.

        `held` are the newest chunks. None where they are prefilled chunk by chunk instead, in a
        session that has forgotten everything.
        """
        return None

    def compiling_pays(self, chunks: int) -> bool:
        """Whether a video of so many chunks is done sooner where layers are compiled first."""
        return False

    def compile(self) -> Self:
        """The model with its layers compiled; the first chunk of a size then takes a while."""
        raise TachyscopeError(f"{self.name} has no layers to compile: leave `compile` out")

    @abc.abstractmethod
    def on_meta(self) -> Self:
        """A copy of the model whose tensors are shapes alone."""

    @abc.abstractmethod
    def memory_parts(self, shape: Shape, prompt: int) -> MemoryParts:
        """Of a model on the meta device, with a prompt of so many cache entries."""

    @abc.abstractmethod
    def prefill_latents(
        self, session: Session, latents: Tensor, actions: Sequence[int], shown: bool = False
    ) -> None:
        """One clean pass over given latents: what `sample` ends with, without the making.

        Decoding goes on behind them, unless they were `shown` already.
        """

    @property
    def decoder_name(self) -> str:
        """What shows latents, where there are several decoders to choose from."""
        return ""

    def decoder_state(self, session: Session) -> dict[str, Tensor]:
        """Of the session's features, those that the next pictures hang on."""
        return {}

    @abc.abstractmethod
    def encode_frames(self, frames: np.ndarray) -> Tensor:
        """Given frames uint8 [F, H, W, 3] as `sample` would have returned them."""

    @abc.abstractmethod
    def decode_latents(self, session: Session, latents: Tensor, video: int = 0) -> np.ndarray:
        """Frames uint8 [F, H, W, 3] of one video of the batch.

        What streaming needs is kept in session.features, for each video by itself.
        """
