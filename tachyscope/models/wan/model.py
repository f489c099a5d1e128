"""Wan-type causal models, with their text encoder and decoder."""

from __future__ import annotations

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
from tachyscope.models.base import MemoryParts, Ready
from tachyscope.models.diffusion import Decoder, DiffusionModel
from tachyscope.models.wan import clip_vision, key_camera, steering
from tachyscope.models.wan import text as wan_text
from tachyscope.models.wan import vae as wan_vae
from tachyscope.models.wan.fp8_gain import check_gain
from tachyscope.models.wan.parts import EncodedPrompt, TextEncoder
from tachyscope.models.wan.sampler import passes
from tachyscope.models.wan.stages_fp8 import Fp8Operations
from tachyscope.models.wan.text import PromptFile
from tachyscope.models.wan.tiny_decoder import ERROR, TinyDecoder
from tachyscope.models.wan.transformer import Block, WanCausal
from tachyscope.models.wan.vae import WanVae

# Compiling layers takes 7 s on an H200, about 3 s from its cache on disk, and saves 40 ms of a
# chunk of Wan 1.3B. A narrow model's time is launches, which a CUDA graph saves already.
COMPILED_CHUNKS, COMPILED_WIDTH = 75, 1024


class WanModel(DiffusionModel):
    """A Wan-type causal model: a transformer, a text encoder and a decoder."""

    transformer: WanCausal

    def __init__(
        self,
        name: str,
        transformer: WanCausal,
        text: TextEncoder | None = None,
        decoder: Decoder | None = None,
    ) -> None:
        super().__init__(name, transformer, decoder)
        self.text, self.config = text, transformer.config
        self.operations: Fp8Operations | None = None  # of linears in float8
        self.fp8_attention = self.simulates_fp8 = False
        if self.device.type == "cuda":
            transformer.fuse()
        self.kind, self.fps = self.config.kind, self.config.fps
        (high, wide), (_, down, across) = self.config.size, self.config.stride
        self.size = high * down, wide * across
        self.actions, self.camera = self.config.actions, self.config.camera
        # the camera that actions move: by keys, or Atrium's
        self.walker: Any = key_camera if self.config.control == "rays" else camera
        knows = self.config.control == "rays" or self.actions == ACTIONS
        self.world = self.walker if knows else None
        if self.actions == key_camera.ACTIONS:
            self.chords = {action: both for action, both in key_camera.BOTH.items() if both}
        self.conditions = self.config.image != "frames"
        self.clip: Callable[[np.ndarray], Tensor] | None = None  # the tokens of a first image
        # action modules attend over time at each place, so a rank needs all frames of a place
        self.splits_tokens = not self.config.action_modules
        self.stock = self.config.stock
        self.context = self.config.context
        self.draws = max(len(self.config.steps), len(self.config.first_steps))
        self.levels = passes(self.config)

    def to_fp8(self, operations: Fp8Operations | None, attention: bool) -> Self:
        """Convert linears to float8 by `operations`, unless they are None; set float8 attention."""
        if operations is not None:
            self.transformer.to_fp8(operations)
        self.operations, self.fp8_attention = operations, attention
        self.simulates_fp8 = self.device.type == "cpu"  # and a copy on the meta device too
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

    def make_transformer(self) -> WanCausal:
        made = WanCausal(self.config).cast(self.dtype)
        return made if self.operations is None else made.to_fp8(self.operations)

    def memory_parts(self, shape: Shape, prompt: int) -> MemoryParts:
        c, frames = self.config, shape.chunk + shape.rolling_frames  # of a pass
        x = torch.empty(self.latent_size(shape, frames), dtype=self.latent_dtype, device="meta")
        t = torch.empty(shape.batch, frames, device="meta")
        with torch.no_grad():
            keys, values = self.transformer.keys_values(
                torch.empty(shape.batch, c.text_len, c.text_dim, device="meta")
            )
        left = steering.empty_past(self, shape, x.device)
        kept = (*keys, *values) if left is None else (*keys, *values, left)
        decoding = self.decoding_memory(x, shape.chunk)
        return MemoryParts(
            weights=tensor_bytes(self.transformer.parameters()),
            decoder=decoding.weights,
            decoder_state=decoding.state,
            prompt=tensor_bytes(kept),
            activations=peak(
                lambda: self.transformer(
                    FreeAttention(), x, t, *steering.empty_controls(self, x, shape, left)
                )
            ),
            decoding=decoding.chunk,
            decoding_one=decoding.one,
        )

    @property
    def overlaps_decode(self) -> bool:
        return not self.context.decodes_in_loop

    @property
    def graph_capturable(self) -> bool:
        return self.context.graph_capturable

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
            # six linears a layer, the patch embedding and the head; action modules
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
        if not self.simulates_fp8:
            linears, what = self.operations is not None, f"{self.name} at {size[0]}x{size[1]}"
            check_gain(shape, self.config.ffn_dim, linears, self.fp8_attention, what)

    def latent_size(self, shape: Shape, frames: int) -> tuple[int, ...]:
        _, high, wide = self.config.patch
        rows, columns = shape.grid
        return shape.batch, self.config.in_channels, frames, rows * high, columns * wide

    def timestep_embedding(self, timestep: float) -> Tensor:
        t = torch.tensor(timestep, dtype=torch.float32, device=self.device)
        return self.transformer.embed_time(t)

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
        if not self.config.action_modules or not images:
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
        if self.config.action_modules:
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
        seen = session.memory.features.seen
        context = prompt.context if seen is None else seen
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
        features = session.memory.features
        again, features.shown = features.shown, None
        if again is None and not shown:
            self.skip_decoding(session, latents)

    @torch.no_grad()
    def encode_frames(self, frames: np.ndarray) -> Tensor:
        if not self.conditions:
            return super().encode_frames(frames)
        self.shape((frames.shape[1], frames.shape[2]))  # raises if the size does not fit
        return steering.condition(self, frames)

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
        return latents.to(self.device, self.latent_dtype)

    @torch.no_grad()
    def decode_latents(self, session: Session, latents: Tensor, video: int = 0) -> np.ndarray:
        shown, session.memory.features.shown = session.memory.features.shown, None
        if shown is not None:
            return shown.numpy()
        return super().decode_latents(session, latents, video)

    @property
    def decoder_files(self) -> str:
        files = {8: wan_vae.PUBLISHED, 16: wan_vae.PUBLISHED_5B}
        name = files.get(self.config.stride[1], "its VAE")
        return f"{name} beside its weights, and pip install -e '.[hf]'"

    def restart_decoder(self, session: Session, latents: Tensor) -> None:
        """Reset the decoder to the state after a video that begins with these latents."""
        state = {name: x for name, x in session.memory.features.decoder().items() if name == ERROR}
        session.memory.features.decoders = {0: state}
        self.require_decoder().skip(latents, state)

    def rewind(self, session: Session, held: Sequence[Tensor]) -> Tensor | None:
        return self.context.rewind(self, session, held)
