"""The interface between a stream and its model. Models call the session, and know no method."""

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
from tachyscope.io.fingerprint import digest, tensor_hash

Ready = Callable[[Tensor], None]  # called with final latents, before the clean pass


class MemoryParts(NamedTuple):
    """Bytes that a model takes at a size, whatever the plan."""

    weights: int  # of the transformer
    decoder: int  # weights of the decoder
    decoder_state: int  # kept of a video between chunks
    prompt: int  # keys and values of cross-attention
    activations: int  # of a pass, without attention
    decoding: int  # while a chunk is decoded
    decoding_one: int = 0  # while one latent frame is, as a CPU decodes them


class WorldModel(Protocol):
    """How actions move a camera in the world that a model was trained on, a unit square."""

    @property
    def START(self) -> tuple[float, float, float]:
        """The default start: x, y, degrees."""

    @property
    def NEAR(self) -> float:
        """The least distance between the camera and a wall."""

    def at(self, starts: Sequence[Sequence[float]], pace: float, device: torch.device) -> Tensor:
        """The states [B, n] of cameras at these starts (x, y, degrees), on the device."""

    def walk(self, camera: Tensor, actions: Tensor) -> Tensor:
        """The poses [B, F, ...] after each of actions [F]; `camera` is updated in place."""


class FrameEngine(Protocol):
    """An engine that samples a token model's frames on fixed memory, with or without drafts."""

    drawn: int  # rows for which the last frame drew codes

    def frame(self, noise: Tensor, action: int | Tensor | None = None) -> Tensor:
        """The next frame's codes [V, N, D], from noise [V, N, D, K]; the caller commits it."""


class NoPrompt(NamedTuple):
    """The encoded prompt of a model that reads none."""

    lengths: tuple[int, ...] = ()


class VideoModel(abc.ABC):
    """A model with frozen weights; all state of a video lives in the session.

    A model of your own sets `transformer` and `size`, and defines `shape`, `rope`, `sample` and
    `decode_latents`. Everything else is optional: `encode_frames` and `prefill_latents` go on from
    given frames, `check_source` and `encode_next` follow a video, `encode_prompt`, `join_prompts`
    and `prefill_prompt` read a prompt, `memory_parts` and `on_meta` predict memory.
    """

    transformer: nn.Module
    size: tuple[int, int]  # default height and width of its frames, in pixels
    name: str = "model"
    kind: str = "chunks"  # "chunks", "tokens" or "rolling": selects the form of named plans
    fps: int = 16
    actions: str = ""  # one letter an action, "" if it takes none; the first is "stay"
    chords: Mapping[str, str] = MappingProxyType({})  # actions that are two keys at once: q: "wj"
    stock: str = ""  # the plan its authors run
    frame_dim: int = 2  # the dimension of latents that is time: [B, C, F, h, w]
    calibration: Path | None = None  # the file of its MLPs' calibration, if there is one
    camera: bool = False  # whether it reads the pose of its camera
    conditions: bool = False  # whether a first image conditions the latents and is not one of them
    opening: np.ndarray | None = None  # frames that a video begins with by default
    world: WorldModel | None = None  # the poses that its actions lead to, if they are known
    splits_tokens: bool = False  # whether ranks can share the tokens of its transformer
    compiled: bool = False  # whether a CPU runs a token's step as a native program
    draws: int = 0  # noise tensors of a chunk that a caller may give; 0 if none

    def __repr__(self) -> str:
        height, width = self.size
        return (
            f"<{type(self).__name__} {self.name}: {self.kind}, {height}x{width}, {self.device}, "
            f"{dtype_name(self.dtype)}>"
        )

    @classmethod
    def narrow(cls, model: Any, fault: str) -> Self:
        """The model, typed as this class; raises `fault` if it is of another."""
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
        """A hash of the weights, computed once."""
        return tensor_hash(self.transformer.state_dict())

    def known_world(self) -> WorldModel:
        """`world`; raises if the model has none."""
        if self.world is None:
            raise TachyscopeError(
                f"{self.name} has a camera and no world to walk in: set self.world, as "
                f"tachyscope/models/wan/model.py does"
            )
        return self.world

    def prompt_key(self, prompt: str) -> str:
        """A hash of the prompt, which snapshots keep."""
        return digest(prompt)

    @property
    def mlps(self) -> Sequence[SliceableMlp]:
        """The MLP of each layer; empty if their neurons cannot be computed apart."""
        return ()

    @abc.abstractmethod
    def shape(self, size: tuple[int, int] | None = None) -> Shape:
        """The model's shape at a size in pixels (height, width), by default its own."""

    def latent_size(self, shape: Shape, frames: int) -> tuple[int, ...]:
        """The shape of a tensor of latent frames; () if it is not checked."""
        return ()

    def check_latents(self, shape: Shape, latents: Any) -> None:
        """Raise unless given latents have the type and shape that `sample` returns."""
        if not isinstance(latents, Tensor) or latents.dim() <= self.frame_dim:
            raise TachyscopeError(
                f"latents must be a tensor, got a {type(latents).__name__}: take those of "
                f"stream.generate()"
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
                f"{list(latents.shape)}: take those of stream.generate()"
            )
        if latents.is_floating_point() and not latents.isfinite().all():
            raise TachyscopeError("latents must be finite, these have NaN or infinity: mend them")

    @abc.abstractmethod
    def rope(self, shape: Shape) -> Rope:
        """The rotary embedding of queries and keys by (t, y, x)."""

    def pixel_frames(self, latents: int) -> int:
        """The pixel frames that a video's first `latents` latent frames decode to."""
        return latents

    def encode_prompt(self, prompt: str) -> Any:
        """The prompt as `prefill_prompt` takes it; its `lengths` are cache entries, by row."""
        if prompt:
            raise TachyscopeError(f"{self.name} reads no prompt, got {prompt[:40]!r}: leave it out")
        return NoPrompt()

    def join_prompts(self, prompts: Sequence[Any]) -> Any:
        """The encoded prompts of a batch's videos as one, as `prefill_prompt` takes it."""
        if all(isinstance(prompt, NoPrompt) for prompt in prompts):
            return NoPrompt()
        raise self._lacks("join_prompts", "make a batch of videos with prompts")

    def embed_images(self, images: Sequence[np.ndarray]) -> Tensor | None:
        """First images, one a video, as cross-attention reads them instead of a prompt."""
        return None

    def prefill_prompt(self, session: Session, prompt: Any) -> None:
        """Give the session the prompt: keys and values of cross-attention, or a prefill pass."""
        if not isinstance(prompt, NoPrompt):
            raise self._lacks("prefill_prompt", "read a prompt")

    def _lacks(self, method: str, purpose: str) -> TachyscopeError:
        """The error for an optional method that the model does not define."""
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
        """The next chunk's clean latents; the last pass over them writes clean keys and values.

        `actions` has one index a latent frame, or is the tensor that `actions_tensor` made of
        them. `ready` is called with the final latents, before the clean pass.
        """

    def finite(self, session: Session, latents: Tensor) -> Tensor:
        """Whether a chunk was sampled from finite numbers: a boolean tensor on the device."""
        return latents.isfinite().all()

    def decode_parts(self) -> Any:
        """`decode.DecodeParts` of a token model; None if the decode engine cannot run it."""
        return None

    def sample_with_engine(
        self, engine: FrameEngine, session: Session, actions: Sequence[int] | Tensor
    ) -> Tensor:
        """`sample` by a decode engine made of `decode_parts`."""
        raise self._lacks("sample_with_engine", "run on the decode engine")

    def actions_tensor(self, actions: Sequence[int] | Tensor, frames: int) -> Tensor | None:
        """Actions of `frames` latent frames as indices [frames] on the device; None without any.

        A CUDA graph of a chunk reads them there, so that it serves every action.
        """
        if not self.actions:
            if any(actions):
                raise TachyscopeError(
                    f"{self.name} takes no actions, got {list(actions)}: leave them out"
                )
            return None
        if isinstance(actions, Tensor) and len(actions) == frames:
            return actions
        if len(actions) != frames or not all(0 <= a < len(self.actions) for a in actions):
            raise TachyscopeError(
                f"{self.name} takes one action a latent frame, here {frames} from 0 to "
                f"{len(self.actions) - 1}, got {list(actions)}: give as many of these"
            )
        # filled on the device, which is not waited for
        return torch.cat([torch.full((1,), int(a), device=self.device) for a in actions])

    @property
    def overlaps_decode(self) -> bool:
        """Whether a chunk may be decoded while the next one is sampled."""
        return True

    @property
    def graph_capturable(self) -> bool:
        """Whether a CUDA graph of `sample` can be replayed for every chunk of a full cache.

        Override it if `sample` reads numbers on the host, such as `actions[0]`.
        """
        return True

    def rewind(self, session: Session, held: Sequence[Tensor]) -> Tensor | None:
        """Make room for a new prompt's KV; returns the latents to prefill in one pass with it.

        `held` are the newest chunks. None: the session forgets everything, and they are prefilled
        chunk by chunk. No frames: the past stays.
        """
        return None

    def compiling_pays(self, chunks: int) -> bool:
        """Whether compiling the layers saves time in a video of this many chunks."""
        return False

    def compile(self) -> Self:
        """Compile the model's layers, at its first chunk of a size; returns the model."""
        raise TachyscopeError(f"{self.name} has no layers to compile: leave `compile` out")

    def on_meta(self) -> Self:
        """A copy of the model on the meta device."""
        raise self._lacks("on_meta", "say what memory it takes")

    def memory_parts(self, shape: Shape, prompt: int) -> MemoryParts:
        """The memory of a model on the meta device, with `prompt` cache entries of a prompt."""
        raise self._lacks("memory_parts", "say what memory it takes")

    def prefill_latents(
        self, session: Session, latents: Tensor, actions: Sequence[int], shown: bool = False
    ) -> None:
        """One clean pass over given latents, as `sample` ends with.

        The decoder continues after them, unless they were `shown` already.
        """
        raise self._lacks("prefill_latents", "go on from given frames or under another prompt")

    @property
    def decoder_name(self) -> str:
        """The decoder's name, if there are several to choose from."""
        return ""

    def encode_frames(self, frames: np.ndarray) -> Tensor:
        """Given frames uint8 [F, H, W, 3] as latents, in the form that `sample` returns."""
        raise self._lacks("encode_frames", "go on from given frames")

    def encoder_state(self, shape: Shape) -> int:
        """Bytes of `encode_next`'s state, of a model on the meta device."""
        return 0

    def check_source(self) -> None:
        """Raise if the model cannot follow a source video."""
        raise self._lacks("encode_next", "follow a source video")

    def encode_next(self, frames: np.ndarray, state: dict[str, Tensor]) -> Tensor:
        """The latents of a source video's next frames, those of one chunk.

        `state` is the encoder's, which is updated. The latents become
        `session.memory.features.source`, and `sample` begins with them at noise level
        `session.memory.features.strength`.
        """
        raise self._lacks("encode_next", "follow a source video")

    @abc.abstractmethod
    def decode_latents(self, session: Session, latents: Tensor, video: int = 0) -> np.ndarray:
        """Frames uint8 [F, H, W, 3] of one video of the batch.

        The decoder's state is `session.memory.features.decoder(video)`.
        """
