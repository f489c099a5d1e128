"""A Wan-type model as a stream drives it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from tachyscope.bounds import check, check_prompt
from tachyscope.errors import TachyscopeError
from tachyscope.fingerprint import digest
from tachyscope.models.atrium import camera
from tachyscope.models.base import MemoryParts, Ready, VideoModel
from tachyscope.models.wan import text as wan_text
from tachyscope.models.wan import vae as wan_vae
from tachyscope.models.wan.parts import Controls, Decoder, EncodedPrompt, TextEncoder
from tachyscope.models.wan.sampler import schedule
from tachyscope.models.wan.text import PromptFile
from tachyscope.models.wan.tiny_decoder import ERROR, TinyDecoder
from tachyscope.models.wan.transformer import RAY, WanCausal, wider
from tachyscope.models.wan.vae import WanVae
from tachyscope.peak_memory import FreeAttention, peak, tensor_bytes
from tachyscope.session import Session
from tachyscope.types import CAMERA, Rope, Shape
from tachyscope.worlds.atrium import ACTIONS

# Compiling layers takes 7 s on an H200 the first time and about 3 s from disk, and saves 40 ms of a
# chunk of Wan 1.3B. A narrow model's chunk is launches, which a CUDA graph saves already.
COMPILED_CHUNKS, COMPILED_WIDTH = 75, 1024


class WanModel(VideoModel):
    """A Wan-type causal model: its transformer, its text encoder and its decoder."""

    transformer: WanCausal
    frame_dim = 2

    def __init__(
        self,
        name: str,
        transformer: WanCausal,
        text: TextEncoder | None = None,
        decoder: Decoder | None = None,
    ) -> None:
        self.name, self.transformer, self.text, self.decoder = name, transformer, text, decoder
        self.config = transformer.config
        self.device = transformer.patch_embedding.weight.device
        self.dtype = transformer.patch_embedding.weight.dtype
        if self.device.type == "cuda":
            transformer.fuse()
        self.kind, self.fps = self.config.kind, self.config.fps
        (high, wide), (_, down, across) = self.config.size, self.config.stride
        self.size = high * down, wide * across
        self.actions, self.camera = self.config.actions, self.config.camera
        self.stock = self.config.stock
        self.context = self.config.context
        self.draws = max(len(self.config.steps), len(self.config.first_steps or ()))
        self.schedule = schedule(self.config)
        self._times: dict[float, Tensor] = {}

    def compiling_pays(self, chunks: int) -> bool:
        large = self.config.dim >= COMPILED_WIDTH
        return self.device.type == "cuda" and large and chunks >= COMPILED_CHUNKS

    def compile(self) -> Self:
        self.transformer.compile_layers()
        if isinstance(self.decoder, WanVae):
            self.decoder.compile_norms()
        elif isinstance(self.decoder, TinyDecoder):
            self.decoder.compile()
        return self

    def on_meta(self) -> Self:
        clone = copy.copy(self)
        clone.device = torch.device("meta")
        clone.decoder = copy.deepcopy(self.decoder)
        for part in _modules(clone.decoder):
            part.to("meta")
        with clone.device:  # made anew: a copy would first take the weights' memory again
            clone.transformer = WanCausal(self.config).cast(self.dtype)
        return clone

    def memory_parts(self, shape: Shape, prompt: int) -> MemoryParts:
        c, frames = self.config, shape.chunk + shape.rolling_frames  # of a pass
        meta: dict[str, Any] = {"device": "meta"}
        x = torch.empty(self.latent_size(shape, frames), dtype=wider(self.dtype), **meta)
        t = torch.empty(shape.batch, frames, **meta)
        actions = torch.empty(frames, dtype=torch.int64, **meta) if c.actions else None
        rays = None
        if c.camera:
            rays = torch.empty(shape.batch, frames * shape.tokens_per_frame, RAY, **meta)
        with torch.no_grad():
            keys, values = self.transformer.keys_values(
                torch.empty(shape.batch, c.text_len, c.text_dim, **meta)
            )
        features: dict[str, Tensor] = {}
        decoding, held = 0, 0
        if self.decoder is not None:
            decoder = self.decoder
            for _ in range(2):  # the first chunk has nothing before it
                decoding = max(decoding, peak(lambda: decoder(x[:1, :, : shape.chunk], features)))
            held = sum(tensor_bytes(part.parameters()) for part in _modules(decoder))
        return MemoryParts(
            weights=tensor_bytes(self.transformer.parameters()),
            decoder=held,
            decoder_state=tensor_bytes(features.values()),
            prompt=tensor_bytes((*keys, *values)),
            activations=peak(lambda: self.transformer(FreeAttention(), x, t, actions, rays)),
            decoding=decoding,
        )

    @property
    def overlaps_decode(self) -> bool:
        return not self.context.decodes_in_loop

    @property
    def graph_capturable(self) -> bool:
        return self.context.graph_capturable

    @property
    def decoder_name(self) -> str:
        return self.decoder.name if self.decoder else ""

    def shape(self, size: tuple[int, int] | None = None) -> Shape:
        c = self.config
        grain = (c.stride[1] * c.patch[1], c.stride[2] * c.patch[2])
        size = size or self.size
        if min(size) <= 0 or size[0] % grain[0] or size[1] % grain[1]:
            raise TachyscopeError(
                f"{self.name} makes frames of a height that {grain[0]} divides and a width that "
                f"{grain[1]} divides, got {size[0]}x{size[1]}: round it"
            )
        if self.camera and tuple(size) != self.size:
            raise TachyscopeError(
                f"{self.name} knows its camera at {self.size[0]}x{self.size[1]} alone, got "
                f"{size[0]}x{size[1]}: leave `size` out"
            )
        for name, side in zip(("height", "width"), size, strict=True):
            check(name, side, f"the {name} of a video", "take a smaller `size`")
        patch = c.in_channels * c.patch[1] * c.patch[2]
        shape = Shape(
            layers=c.layers,
            heads=c.heads,
            kv_heads=c.heads,
            head_dim=c.head_dim,
            width=c.dim,
            grid=(size[0] // grain[0], size[1] // grain[1]),
            chunk=c.chunk,
            rolling_frames=self.context.rolling_frames(c),
            passes=len(c.levels) + 1,
            text=c.text_len,
            # six linears a layer, the patch embedding and the head
            macs=c.layers * 6 * c.dim**2 + 2 * patch * c.dim,
            poses=c.actions == ACTIONS,
        )
        what, advice = f"tokens of a pass at {size[0]}x{size[1]}", "take a smaller `size`"
        check("tokens of a pass", shape.max_pass_tokens, what, advice)
        return shape

    def latent_size(self, shape: Shape, frames: int) -> tuple[int, ...]:
        _, high, wide = self.config.patch
        rows, columns = shape.grid
        return shape.batch, self.config.in_channels, frames, rows * high, columns * wide

    def embed_time(self, timestep: float) -> Tensor:
        """A timestep's embedding [W] in host memory, where it is from the second time on."""
        if timestep not in self._times:
            t = torch.tensor(timestep, dtype=torch.float32, device=self.device)
            self._times[timestep] = self.transformer.embed_time(t).cpu()
        return self._times[timestep]

    def rope(self, shape: Shape) -> Rope:
        side = 2 * (shape.head_dim // 6)
        return Rope(
            (
                (shape.head_dim - 2 * side, (1.0, 0.0, 0.0)),
                (side, (0.0, 1.0, 0.0)),
                (side, (0.0, 0.0, 1.0)),
            )
        )

    def pixel_frames(self, latents: int) -> int:
        return self.require_decoder().pixel_frames(latents)

    @torch.no_grad()
    def encode_prompt(self, prompt: str) -> EncodedPrompt:
        if self.text is None:
            raise TachyscopeError(
                f"{self.name} was loaded without a text encoder, which an empty prompt needs too: "
                f"put {wan_text.PUBLISHED} and google/umt5-xxl beside its weights, or give a "
                f"prompt file"
            )
        context, length = self.text(check_prompt(prompt))
        return EncodedPrompt(context.to(self.device), (length,))

    def join_prompts(self, prompts: Sequence[EncodedPrompt]) -> EncodedPrompt:
        context = torch.cat([prompt.context for prompt in prompts])
        return EncodedPrompt(context, tuple(n for prompt in prompts for n in prompt.tokens))

    def prompt_key(self, prompt: str) -> str:
        if not isinstance(self.text, PromptFile):
            return super().prompt_key(prompt)
        # the file, not its name, is the prompt
        context, length = self.text(prompt)
        return digest(context[0, :length].float().numpy().tobytes())

    @torch.no_grad()
    def prefill_prompt(self, session: Session, prompt: EncodedPrompt) -> None:
        each = session.shape.batch // len(prompt.tokens)
        context = prompt.context.repeat_interleave(each, 0)
        keys, values = self.transformer.keys_values(context)
        session.set_prompt_kv(keys, values, [n for n in prompt.tokens for _ in range(each)])

    @torch.no_grad()
    def sample(
        self,
        session: Session,
        actions: Sequence[int] | Tensor,
        ready: Ready | None = None,
    ) -> Tensor:
        controls = self._controls(session, actions, self.config.chunk)
        clean = self.context.denoise(self, session, controls)
        if ready is not None:
            ready(clean)
        self.context.remember(self, session, clean, controls)
        session.made += self.config.chunk
        return clean

    @torch.no_grad()
    def prefill_latents(
        self, session: Session, latents: Tensor, actions: Sequence[int], shown: bool = False
    ) -> None:
        controls = self._controls(session, actions, latents.shape[2])
        latents = latents.to(self.device)
        self.context.remember(self, session, latents, controls)
        again = session.features.pop("shown", None) is not None
        if self.decoder is not None and not again and not shown:
            for video, part in enumerate(latents.split(1)):
                with _decoder_features(session, video) as features:
                    self.decoder.skip(part, features)

    def decoder_state(self, session: Session) -> dict[str, Tensor]:
        others = ("window", "shown", CAMERA)
        return {name: x for name, x in session.features.items() if name not in others}

    @torch.no_grad()
    def encode_frames(self, frames: np.ndarray) -> Tensor:
        self.shape((frames.shape[1], frames.shape[2]))  # raises where the size does not fit
        return self.require_decoder().encode(frames).to(self.device, wider(self.dtype))

    @torch.no_grad()
    def decode_latents(self, session: Session, latents: Tensor, video: int = 0) -> np.ndarray:
        shown = session.features.pop("shown", None)
        if shown is not None:
            return shown.numpy()
        with _decoder_features(session, video) as features:
            return self.require_decoder()(latents, features)

    def restart_decoder(self, session: Session, latents: Tensor) -> None:
        """Decode what follows as a video that begins with these latents."""
        for name in self.decoder_state(session):
            if name != ERROR:
                del session.features[name]
        self.require_decoder().skip(latents, session.features)

    def switch_prompt(self, session: Session, held: Sequence[Tensor]) -> Tensor | None:
        return self.context.switch(self, session, held)

    def require_decoder(self) -> Decoder:
        if self.decoder is None:
            raise TachyscopeError(
                f"{self.name} was loaded without a decoder, got latents to show: put "
                f"{wan_vae.PUBLISHED} beside its weights, and pip install tachyscope[hf]"
            )
        return self.decoder

    def actions_tensor(self, actions: Sequence[int] | Tensor, frames: int) -> Tensor | None:
        # put on the device without waiting for it
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
        return torch.cat([torch.full((1,), a, device=self.device) for a in actions])

    def _controls(self, session: Session, actions: Sequence[int] | Tensor, frames: int) -> Controls:
        """What steers the next latent frames; the camera then stands at the last of them."""
        numbers = self.actions_tensor(actions, frames)
        if numbers is None or not (self.camera or session.wants_poses):
            return Controls(numbers)
        if CAMERA not in session.features:  # a session that was made by hand
            start = camera.place([camera.START] * session.shape.batch, 1.0, self.device)
            session.features[CAMERA] = start
        poses = camera.walk(session.features[CAMERA], numbers)
        if session.wants_poses:
            session.set_poses(camera.matrices(poses))
        return Controls(numbers, camera.rays(poses, session.shape.grid) if self.camera else None)

    def noise(self, session: Session, draw: int, ahead: int = 0) -> Tensor:
        """A chunk's noise, the draw-th that it takes: as handed in, else drawn.

        The chunk is the one that is made, or so many ahead of it.
        """
        given = session.given_noise(draw, ahead)
        if given is None:
            return self._draw(session)
        return given.to(self.device, wider(self.dtype))

    def _draw(self, session: Session) -> Tensor:
        batch, *size = self.latent_size(session.shape, session.shape.chunk)
        size = [batch // len(session.generators), *size]
        # drawn in float32 whatever the model's dtype, so that dtypes can be compared
        fine: dict[str, Any] = {"dtype": torch.float32, "device": self.device}
        drawn = [torch.randn(size, generator=each, **fine) for each in session.generators]
        return torch.cat(drawn).to(wider(self.dtype))


@contextmanager
def _decoder_features(session: Session, video: int) -> Iterator[dict[str, Tensor]]:
    """The streaming state of one video's decoding: of the first under its plain names."""
    if video == 0:
        yield session.features
        return
    prefix = f"video{video}."
    features = {
        name.removeprefix(prefix): x
        for name, x in session.features.items()
        if name.startswith(prefix)
    }
    yield features
    session.features |= {prefix + name: x for name, x in features.items()}


def _modules(part: object) -> list[nn.Module]:
    """The modules that a decoder holds."""
    return [] if part is None else [x for x in vars(part).values() if isinstance(x, nn.Module)]
