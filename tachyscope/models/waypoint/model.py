"""Waypoint, which samples one latent frame for each action."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.session import Session
from tachyscope.core.types import DenoisePass, Rope, Shape
from tachyscope.memory.allocations import FreeAttention, peak, tensor_bytes
from tachyscope.models.base import MemoryParts, Ready
from tachyscope.models.diffusion import Decoder, DiffusionModel
from tachyscope.models.waypoint import controls
from tachyscope.models.waypoint.autoencoder import FILES
from tachyscope.models.waypoint.config import STRIDE
from tachyscope.models.waypoint.transformer import Waypoint


class WaypointModel(DiffusionModel):
    """A Waypoint: its transformer, and its decoder, if it has one."""

    transformer: Waypoint
    actions = controls.ACTIONS
    chords = controls.CHORDS
    draws = 1
    decoder_files = f"{FILES[0]} beside its weights, or give it as `decoder`"

    def __init__(self, name: str, transformer: Waypoint, decoder: Decoder | None = None) -> None:
        super().__init__(name, transformer, decoder)
        self.config = transformer.config
        self.size, self.fps = self.config.size, self.config.inference_fps
        self.stock = self.config.stock
        # rounded to the model's precision, as in the authors' code
        self.sigmas = torch.tensor(self.config.scheduler_sigmas, dtype=self.dtype).tolist()
        self.presses = controls.table(self.config.n_buttons, self.device)

    def shape(self, size: tuple[int, int] | None = None) -> Shape:
        c = self.config
        if size is not None and tuple(size) != self.size:
            raise TachyscopeError(
                f"{self.name} makes frames of {self.size[0]}x{self.size[1]} alone, got "
                f"{size[0]}x{size[1]}: leave `size` out"
            )
        return Shape(
            layers=c.n_layers,
            heads=c.n_heads,
            kv_heads=c.n_kv_heads,
            head_dim=c.head_dim,
            width=c.d_model,
            grid=(c.height, c.width),
            passes=len(self.sigmas),
            macs=self._macs,
        )

    @property
    def _macs(self) -> int:
        """Multiply-adds of a token's linears outside the MLPs."""
        c = self.config
        layer = c.d_model * c.head_dim * 2 * (c.n_heads + c.n_kv_heads)
        fusions = sum(c.fuses(i) for i in range(c.n_layers)) * 2 * c.d_model**2
        return c.n_layers * layer + fusions + 2 * self._end_macs

    @property
    def _end_macs(self) -> int:
        """Multiply-adds of a token's patch embedding, or of its output patch."""
        return self.config.channels * math.prod(self.config.patch) * self.config.d_model

    def rope(self, shape: Shape) -> Rope:
        """Rows and columns rotate at "pixel" frequencies, time as in a language model.

        Positions are not centred and pairs are interleaved, unlike in the authors' code: attention
        depends only on differences of positions, and queries and keys are laid out alike.
        """
        c, head = self.config, shape.head_dim
        most = c.rope_nyquist_frac * min(shape.grid) / 2
        steps = torch.linspace(1, most, head // 16, dtype=torch.float64).tolist()
        column, row = (
            [2 / side * math.pi * step for step in steps for _ in range(2)]
            for side in reversed(shape.grid)
        )
        time = [c.rope_theta ** (-i / (head // 4)) for i in range(0, head // 4, 2)]
        axes = (
            (head // 4, (0.0, 0.0, 1.0)),
            (head // 4, (0.0, 1.0, 0.0)),
            (head // 2, (1.0, 0.0, 0.0)),
        )
        return Rope(axes, speeds=(*column, *row, *(x for x in time for _ in range(2))))

    def latent_size(self, shape: Shape, frames: int) -> tuple[int, ...]:
        (high, wide), c = self.config.patch, self.config
        return shape.batch, c.channels, frames, shape.grid[0] * high, shape.grid[1] * wide

    def pixel_frames(self, latents: int) -> int:
        return STRIDE[0] * latents

    @torch.no_grad()
    def sample(
        self, session: Session, actions: Sequence[int] | Tensor, ready: Ready | None = None
    ) -> Tensor:
        pressed = self._pressed(actions)
        x, levels = self.noise(session, 0), list(pairwise(self.sigmas))
        for i, (sigma, then) in enumerate(levels):
            now = DenoisePass(
                i, len(levels), 1000 * sigma, sigma, x, self.embed_time,
                self.transformer.embed_patches,
            )  # fmt: skip
            clean = session.predict(now, partial(self._denoise, session, pressed))
            # an Euler step to the next level; a skipped pass keeps the clean estimate
            x = clean + then / sigma * (x - clean)
        if ready is not None:
            ready(x)
        self._remember(session, x, pressed)
        session.memory.made += 1
        return x

    def _denoise(self, session: Session, pressed: Tensor, now: DenoisePass) -> Tensor:
        """The clean latents that one pass predicts."""
        session.begin(session.positions(1), now.index, len(self.sigmas), [now.noise])
        velocity = self.transformer(session, now.x, self._level(now.noise), pressed)
        return now.x - now.noise * velocity

    def _remember(self, session: Session, x: Tensor, pressed: Tensor) -> None:
        """A pass over clean latents, whose keys and values stay in the cache.

        It ends in the last layer, without its output linear, its control fusion and the head.
        """
        c, last = self.config, len(self.sigmas) - 1
        unused = c.n_heads * c.head_dim * c.d_model + self._end_macs
        unused += c.fuses(c.n_layers - 1) * 2 * c.d_model**2
        session.begin(session.positions(1), last, last + 1, [0.0], unused=unused)
        self.transformer(session, x, self._level(0.0), pressed, session.write_kv)

    def _pressed(self, actions: Sequence[int] | Tensor) -> Tensor:
        """The controls [buttons + 3] of one action; the device is not waited for."""
        return self.presses[self.actions_tensor(actions, 1)][0]

    def _level(self, sigma: float) -> Tensor:
        return torch.full((), sigma, dtype=torch.float64, device=self.device)

    @torch.no_grad()
    def prefill_latents(
        self, session: Session, latents: Tensor, actions: Sequence[int], shown: bool = False
    ) -> None:
        latents = latents.to(self.device, self.latent_dtype)
        self._remember(session, latents, self._pressed(actions))
        if not shown:
            self.skip_decoding(session, latents)

    def make_transformer(self) -> Waypoint:
        return Waypoint(self.config).to(self.dtype)

    def timestep_embedding(self, timestep: float) -> Tensor:
        return self.transformer.embed_noise(self._level(timestep / 1000))

    def memory_parts(self, shape: Shape, prompt: int) -> MemoryParts:
        x = torch.empty(self.latent_size(shape, 1), dtype=self.latent_dtype, device="meta")
        sigma, pressed = x.new_empty(()), x.new_empty(self.config.n_buttons + 3)
        decoding = self.decoding_memory(x, 1)
        return MemoryParts(
            weights=tensor_bytes(self.transformer.parameters()),
            decoder=decoding.weights,
            decoder_state=decoding.state,
            prompt=0,
            activations=peak(lambda: self.transformer(FreeAttention(), x, sigma, pressed)),
            decoding=decoding.chunk,
            decoding_one=decoding.one,
        )
