"""What a stream needs of a model. Models know the session, no method."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.session import Session
from tachyscope.core.types import Rope, Shape, SliceableMlp, dtype_name
from tachyscope.io.fingerprint import digest, of_tensors

Ready = Callable[[Tensor], None]  # is handed final latents before the cache is written


class MemoryParts(NamedTuple):
    """Bytes that depend on a model and its size, and on no plan."""

    weights: int
    decoder: int  # its weights
    decoder_state: int  # what it keeps of a video between chunks
    prompt: int  # keys and values of cross-attention
    activations: int  # of a pass, attention left out
    decoding: int
    decoding_one: int = 0  # latent frame, where a CPU decodes them one by one


class WorldModel(Protocol):
    """How a camera stands and walks in the world that a model was trained on, a unit square."""

    @property
    def START(self) -> tuple[float, float, float]:
        """Where it stands unless asked otherwise: x, y, degrees."""

    @property
    def NEAR(self) -> float:
        """The closest that it comes to a wall."""

    def at(self, starts: Sequence[Sequence[float]], pace: float, device: torch.device) -> Tensor:
        """A camera for each start (x, y, degrees), [B, n] numbers of the device."""

    def walk(self, camera: Tensor, actions: Tensor) -> Tensor:
        """The poses [B, F, ...] that actions [F] lead cameras to; they then stand at the last."""


class FrameEngine(Protocol):
    """What makes a token model's frames on fixed memory: the decode engine, or that of drafts."""

    drawn: int  # rows whose codes the last frame drew

    def frame(self, noise: Tensor, action: int | Tensor | None = None) -> Tensor:
        """The next frame's codes [V, N, D], from noise [V, N, D, K]; the caller commits it."""


class NoPrompt(NamedTuple):
    """What a model that reads no prompt makes of one."""

    lengths: tuple[int, ...] = ()


class VideoModel(abc.ABC):
    """A model, frozen: all that changes during a video lives in the session.

    A model of one's own sets `transformer` and `size`, and defines `shape`, `rope`, `sample` and
    `decode_latents`; what else it defines it can do more with: `encode_frames` and
    `prefill_latents` to go on from given frames, `check_source` and `encode_next` to follow a
    video, the prompt's three methods to read one, `memory_parts` and `on_meta` to be told whether
    it fits.
    """

    transformer: nn.Module
    size: tuple[int, int]  # (height, width) in pixels of the frames it makes unless asked otherwise
    name: str = "model"
    kind: str = "chunks"  # "chunks", "tokens" or "rolling": which named plans are meant
    fps: int = 16
    actions: str = ""  # one letter an action, "" where the model takes none; the first is "stay"
    chords: Mapping[str, str] = MappingProxyType({})  # actions that are two keys at once: q: "wj"
    stock: str = ""  # the plan its authors run
    frame_dim: int = 2  # which dimension of latents counts frames: [B, C, F, h, w]
    calibration: Path | None = None  # of its MLPs, where it lies beside the weights
    camera: bool = False  # whether it is told where its camera stands
    # whether a given first picture is told beside the latents, and is none of them
    conditions: bool = False
    opening: np.ndarray | None = None  # given frames that a video begins with where none are given
    world: WorldModel | None = None  # where poses can be told from actions
    splits_tokens: bool = False  # whether its transformer computes a rank's tokens alone
    compiled: bool = False  # whether a token's step is a native program, on a CPU
    # how often noise is drawn for a chunk; 0 where it cannot be handed in instead
    draws: int = 0

    def __repr__(self) -> str:
        height, width = self.size
        return (
            f"<{type(self).__name__} {self.name}: {self.kind}, {height}x{width}, {self.device}, "
            f"{dtype_name(self.dtype)}>"
        )

    @classmethod
    def narrow(cls, model: Any, fault: str) -> Self:
        """The model as one of this family; raises with `fault` where it is none."""
        if not isinstance(model, cls):
            raise TachyscopeError(fault)
        return model

    @functools.cached_property
    def device(self) -> torch.device:
        return next(self.transformer.parameters()).device

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        return next(self.transformer.parameters()).dtype

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of the weights; worked out when first asked for."""
        return of_tensors(self.transformer.state_dict())

    def known_world(self) -> WorldModel:
        """Its world; raises where it has none."""
        if self.world is None:
            raise TachyscopeError(
                f"{self.name} has a camera and no world to walk in: set self.world, as "
                f"tachyscope/models/wan/model.py does"
            )
        return self.world

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

    def latent_size(self, shape: Shape, frames: int) -> tuple[int, ...]:
        """The shape of the tensor that holds so many latent frames; () where any will do."""
        return ()

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
            or (size and tuple(latents.shape) != size)
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

    def pixel_frames(self, latents: int) -> int:
        """Pixel frames that this many latent frames decode to."""
        return latents

    def encode_prompt(self, prompt: str) -> Any:
        """The prompt as `prefill_prompt` takes it; `lengths`: cache entries a row of it fills."""
        if prompt:
            raise TachyscopeError(f"{self.name} reads no prompt, got {prompt[:40]!r}: leave it out")
        return NoPrompt()

    def join_prompts(self, prompts: Sequence[Any]) -> Any:
        """Encoded prompts, one a video of a batch, as `prefill_prompt` takes them."""
        if all(isinstance(prompt, NoPrompt) for prompt in prompts):
            return NoPrompt()
        raise self._lacks("join_prompts", "make a batch of videos with prompts")

    def embed_images(self, images: Sequence[np.ndarray]) -> Tensor | None:
        """First images, one a video, as cross-attention reads them instead of a prompt."""
        return None

    def prefill_prompt(self, session: Session, prompt: Any) -> None:
        """Hand the prompt to the session: cross-attention's keys and values, or one prefill."""
        if not isinstance(prompt, NoPrompt):
            raise self._lacks("prefill_prompt", "read a prompt")

    def _lacks(self, method: str, purpose: str) -> TachyscopeError:
        """What is raised where a model is asked for what it does not define."""
        return TachyscopeError(
            f"{self.name} cannot {purpose}: {type(self).__name__} defines no {method}"
        )

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

    def finite(self, session: Session, latents: Tensor) -> Tensor:
        """Whether a chunk that `sample` made came of finite numbers: a boolean of the device's."""
        return latents.isfinite().all()

    def decode_parts(self) -> Any:
        """`decode.DecodeParts` of a token model; None where the engine has no such form."""
        return None

    def sample_with_engine(
        self, engine: FrameEngine, session: Session, actions: Sequence[int] | Tensor
    ) -> Tensor:
        """`sample` by an engine of those parts."""
        raise self._lacks("sample_with_engine", "run on the decode engine")

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

    def rewind(self, session: Session, held: Sequence[Tensor]) -> Tensor | None:
        """Make room for a new prompt's KV; the latents to prefill in one pass under that prompt.

        `held` are the newest chunks. None where they are prefilled chunk by chunk instead, in a
        session that has forgotten everything; no frames of them where the past stays as it is.
        """
        return None

    def compiling_pays(self, chunks: int) -> bool:
        """Whether a video of so many chunks is done sooner where layers are compiled first."""
        return False

    def compile(self) -> Self:
        """The model with its layers compiled; the first chunk of a size then takes a while."""
        raise TachyscopeError(f"{self.name} has no layers to compile: leave `compile` out")

    def on_meta(self) -> Self:
        """A copy of the model whose tensors are shapes alone."""
        raise self._lacks("on_meta", "say what memory it takes")

    def memory_parts(self, shape: Shape, prompt: int) -> MemoryParts:
        """Of a model on the meta device, with a prompt of so many cache entries."""
        raise self._lacks("memory_parts", "say what memory it takes")

    def prefill_latents(
        self, session: Session, latents: Tensor, actions: Sequence[int], shown: bool = False
    ) -> None:
        """One clean pass over given latents: what `sample` ends with, without the making.

        Decoding goes on behind them, unless they were `shown` already.
        """
        raise self._lacks("prefill_latents", "go on from given frames or under another prompt")

    @property
    def decoder_name(self) -> str:
        """What shows latents, where there are several decoders to choose from."""
        return ""

    def encode_frames(self, frames: np.ndarray) -> Tensor:
        """Given frames uint8 [F, H, W, 3] as `sample` would have returned them."""
        raise self._lacks("encode_frames", "go on from given frames")

    def encoder_state(self, shape: Shape) -> int:
        """Bytes that `encode_next` keeps between chunks, of a model on the meta device."""
        return 0

    def check_source(self) -> None:
        """Raise where the model cannot follow a source video."""
        raise self._lacks("encode_next", "follow a source video")

    def encode_next(self, frames: np.ndarray, state: dict[str, Tensor]) -> Tensor:
        """A source video's next frames, as many as the next chunk has, as latents.

        `state` is what the encoder keeps of the frames before them. The latents are then
        `session.features.source`, and `sample` begins with them at noise level
        `session.features.strength`.
        """
        raise self._lacks("encode_next", "follow a source video")

    @abc.abstractmethod
    def decode_latents(self, session: Session, latents: Tensor, video: int = 0) -> np.ndarray:
        """Frames uint8 [F, H, W, 3] of one video of the batch.

        What streaming needs is kept in `session.features.decoder(video)`.
        """
