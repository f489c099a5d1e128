"""A Wan-type model as a stream drives it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.limits import check, check_prompt
from tachyscope.core.session import Session
from tachyscope.core.types import Rope, Shape
from tachyscope.io.fingerprint import digest
from tachyscope.memory.allocations import FreeAttention, peak, tensor_bytes
from tachyscope.models.atrium import camera
from tachyscope.models.atrium.world import ACTIONS
from tachyscope.models.base import MemoryParts, Ready, VideoModel
from tachyscope.models.wan import clip_vision, keys, steering
from tachyscope.models.wan import text as wan_text
from tachyscope.models.wan import vae as wan_vae
from tachyscope.models.wan.fp8_gain import check_gain
from tachyscope.models.wan.parts import (
    Decoder,
    EncodedPrompt,
    TextEncoder,
    modules_of,
    on_meta,
)
from tachyscope.models.wan.sampler import noising, schedule
from tachyscope.models.wan.stages import wider
from tachyscope.models.wan.stages_fp8 import Fp8Operations
from tachyscope.models.wan.text import PromptFile
from tachyscope.models.wan.tiny_decoder import ERROR, TinyDecoder
from tachyscope.models.wan.transformer import Block, WanCausal
from tachyscope.models.wan.vae import WanVae

# Compiling layers takes 7 s on an H200 the first time and about 3 s from disk, and saves 40 ms of a
# chunk of Wan 1.3B. A narrow model's chunk is launches, which a CUDA graph saves already.
COMPILED_CHUNKS, COMPILED_WIDTH = 75, 1024


class WanModel(VideoModel):
    """A Wan-type causal model: its transformer, its text encoder and its decoder."""

    transformer: WanCausal
    frame_dim = 2
    splits_tokens = True

    def __init__(
        self,
        name: str,
        transformer: WanCausal,
        text: TextEncoder | None = None,
        decoder: Decoder | None = None,
    ) -> None:
        self.name, self.transformer, self.text, self.decoder = name, transformer, text, decoder
        self.config = transformer.config
        self.operations: Fp8Operations | None = None  # of linears in float8
        self.fp8_attention = False
        self.revisions: dict[str, str] = {}  # commits of repositories that it was downloaded from
        self.device = transformer.patch_embedding.weight.device
        self.dtype = transformer.patch_embedding.weight.dtype
        if self.device.type == "cuda":
            transformer.fuse()
        self.kind, self.fps = self.config.kind, self.config.fps
        (high, wide), (_, down, across) = self.config.size, self.config.stride
        self.size = high * down, wide * across
        self.actions, self.camera = self.config.actions, self.config.camera
        # how a camera walks: by Atrium's actions, or by keys
        self.walker: Any = keys if self.config.control == "rays" else camera
        knows = self.config.control == "rays" or self.actions == ACTIONS
        self.world = self.walker if knows else None
        if self.actions == keys.ACTIONS:
            self.chords = {action: both for action, both in keys.BOTH.items() if both}
        self.conditions = self.config.image != "frames"
        self.clip: Callable[[np.ndarray], Tensor] | None = None  # the tokens of a first image
        # a pad's modules look back at each place: all its frames must be at hand
        self.splits_tokens = not self.config.pad
        self.stock = self.config.stock
        self.context = self.config.context
        self.draws = max(len(self.config.steps), len(self.config.first_steps or ()))
        self.schedule, self.noising = schedule(self.config), noising(self.config)
        self._times: dict[float, Tensor] = {}

    def to_fp8(self, operations: Fp8Operations | None, attention: bool) -> Self:
        """The model with linears of float8 codes where operations on them are given, and with
        attention of codes where that is asked for."""
        if operations is not None:
            self.transformer.to_fp8(operations)
        self.operations, self.fp8_attention = operations, attention
        return self

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
        clone.decoder = on_meta(self.decoder)
        with clone.device:  # made anew: a copy would first take the weights' memory again
            clone.transformer = WanCausal(self.config).cast(self.dtype)
            if self.operations is not None:
                clone.transformer.to_fp8(self.operations)
        return clone

    def memory_parts(self, shape: Shape, prompt: int) -> MemoryParts:
        c, frames = self.config, shape.chunk + shape.rolling_frames  # of a pass
        x = torch.empty(self.latent_size(shape, frames), dtype=wider(self.dtype), device="meta")
        t = torch.empty(shape.batch, frames, device="meta")
        with torch.no_grad():
            keys, values = self.transformer.keys_values(
                torch.empty(shape.batch, c.text_len, c.text_dim, device="meta")
            )
        features: dict[str, Tensor] = {}
        decoding, one, held = 0, 0, 0
        if self.decoder is not None:
            decoder = self.decoder
            for _ in range(2):  # the first chunk has nothing before it
                before = tensor_bytes(features.values())
                most = peak(lambda: decoder(x[:1, :, : shape.chunk], features))
                # less what stays of it
                decoding = max(decoding, most + before - tensor_bytes(features.values()))
                one = max(one, peak(lambda: decoder(x[:1, :, :1], features)))
            held = sum(tensor_bytes(part.parameters()) for part in modules_of(decoder))
        left = steering.left_behind(self, shape, x.device)
        kept = (*keys, *values) if left is None else (*keys, *values, left)
        return MemoryParts(
            weights=tensor_bytes(self.transformer.parameters()),
            decoder=held,
            decoder_state=tensor_bytes(features.values()),
            prompt=tensor_bytes(kept),
            activations=peak(
                lambda: self.transformer(
                    FreeAttention(), x, t, *steering.sketch(self, x, shape, left)
                )
            ),
            decoding=decoding,
            decoding_one=one,
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
        ends = (2 * c.in_channels + c.condition_channels) * c.patch[1] * c.patch[2]
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
            # six linears a layer, the patch embedding and the head; what a pad tells in layers
            macs=c.layers * 6 * c.dim**2 + ends * c.dim + self._module_macs,
            poses=self.world is not None,
            fp8_attention=self.fp8_attention,
        )
        what, advice = f"tokens of a pass at {size[0]}x{size[1]}", "take a smaller `size`"
        check("tokens of a pass", shape.max_pass_tokens, what, advice)
        if tuple(size) != self.size:
            self.check_fp8_gain(shape, size)
        return shape

    def check_fp8_gain(self, shape: Shape, size: tuple[int, int]) -> None:
        """Raise if float8 cannot save time at a size on a GPU; a CPU simulates it anyway."""
        if self.device.type != "cpu":
            linears, what = self.operations is not None, f"{self.name} at {size[0]}x{size[1]}"
            check_gain(shape, self.config.ffn_dim, linears, self.fp8_attention, what)

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

    @property
    def _module_macs(self) -> int:
        layers = cast(list[Block], self.transformer.blocks)
        modules = [one.action_model for one in layers if one.action_model is not None]
        return sum(one.macs(self.config.dim) for one in modules)

    @torch.no_grad()
    def embed_images(self, images: Sequence[np.ndarray]) -> Tensor | None:
        if not self.config.pad or not images:
            return None
        if self.clip is None:
            raise TachyscopeError(
                f"{self.name} was loaded without CLIP, which encodes its first image: put "
                f"{clip_vision.PUBLISHED} beside its weights"
            )
        tokens = torch.cat([self.clip(image) for image in images])
        return tokens.to(self.device, self.dtype)

    @torch.no_grad()
    def encode_prompt(self, prompt: str) -> EncodedPrompt:
        if self.config.pad:
            super().encode_prompt(prompt)  # raises where there is one
            c = self.config
            nothing = torch.zeros(1, c.text_len, c.text_dim, device=self.device, dtype=self.dtype)
            return EncodedPrompt(nothing, (c.text_len,))
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
        context = (
            prompt.context if session.memory.features.seen is None else session.memory.features.seen
        )
        context = context.expand(len(prompt.tokens), -1, -1).repeat_interleave(each, 0)
        keys, values = self.transformer.keys_values(context)
        session.set_prompt_kv(keys, values, [n for n in prompt.tokens for _ in range(each)])

    @torch.no_grad()
    def sample(
        self, session: Session, actions: Sequence[int] | Tensor, ready: Ready | None = None
    ) -> Tensor:
        controls = steering.controls(self, session, actions, self.config.chunk)
        clean = self.context.denoise(self, session, controls)
        if ready is not None:
            ready(clean)
        self.context.remember(self, session, clean, controls)
        session.memory.made += self.config.chunk
        return clean

    @torch.no_grad()
    def prefill_latents(
        self, session: Session, latents: Tensor, actions: Sequence[int], shown: bool = False
    ) -> None:
        controls = steering.controls(self, session, actions, latents.shape[2])
        latents = latents.to(self.device)
        self.context.remember(self, session, latents, controls)
        again, session.memory.features.shown = session.memory.features.shown, None
        if self.decoder is not None and again is None and not shown:
            for video, part in enumerate(latents.split(1)):
                self.decoder.skip(part, session.memory.features.decoder(video))

    @torch.no_grad()
    def encode_frames(self, frames: np.ndarray) -> Tensor:
        self.shape((frames.shape[1], frames.shape[2]))  # raises where the size does not fit
        if self.conditions:
            return steering.condition(self, frames)
        return self.require_decoder().encode(frames).to(self.device, wider(self.dtype))

    def encoder_state(self, shape: Shape) -> int:
        if self.decoder is None:
            return 0
        _, high, wide = self.config.stride
        *_, rows, columns = self.latent_size(shape, 1)
        return self.decoder.encoder_state((rows * high, columns * wide))

    def check_source(self) -> None:
        if self.context.rolling_frames(self.config):
            raise TachyscopeError(
                f"{self.name} makes several chunks together, each at a noise level of its own, and "
                f"follows no source video: leave `video` out"
            )
        _, high, wide = self.config.stride
        # raises where the decoder only shows
        self.require_decoder().encode(np.zeros((1, high, wide, 3), np.uint8))

    @torch.no_grad()
    def encode_next(self, frames: np.ndarray, state: dict[str, Tensor]) -> Tensor:
        latents = self.require_decoder().encode_next(frames, state)
        return latents.to(self.device, wider(self.dtype))

    @torch.no_grad()
    def decode_latents(self, session: Session, latents: Tensor, video: int = 0) -> np.ndarray:
        shown, session.memory.features.shown = session.memory.features.shown, None
        if shown is not None:
            return shown.numpy()
        return self.require_decoder()(latents, session.memory.features.decoder(video))

    def restart_decoder(self, session: Session, latents: Tensor) -> None:
        """Decode what follows as a video that begins with these latents."""
        state = {name: x for name, x in session.memory.features.decoder().items() if name == ERROR}
        session.memory.features.decoders = {0: state}
        self.require_decoder().skip(latents, state)

    def rewind(self, session: Session, held: Sequence[Tensor]) -> Tensor | None:
        return self.context.rewind(self, session, held)

    def require_decoder(self) -> Decoder:
        if self.decoder is None:
            files = {8: wan_vae.PUBLISHED, 16: wan_vae.PUBLISHED_5B}
            raise TachyscopeError(
                f"{self.name} was loaded without a decoder, got latents to show: put "
                f"{files.get(self.config.stride[1], 'its VAE')} beside its weights, and pip "
                f"install -e '.[hf]'"
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

    def noise(self, session: Session, draw: int, ahead: int = 0) -> Tensor:
        """A chunk's noise, the draw-th that it takes: as handed in, else drawn.

        The chunk is the one that is made, or so many ahead of it.
        """
        given = session.memory.given_noise(draw, ahead)
        if given is None:
            return self._draw(session)
        return given.to(self.device, wider(self.dtype))

    def _draw(self, session: Session) -> Tensor:
        batch, *size = self.latent_size(session.shape, session.shape.chunk)
        size = [batch // len(session.generators), *size]
        # drawn in float32 whatever the model's dtype, so that dtypes can be compared
        drawn = [
            torch.randn(size, generator=each, dtype=torch.float32, device=self.device)
            for each in session.generators
        ]
        return torch.cat(drawn).to(wider(self.dtype))
