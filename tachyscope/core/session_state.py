"""What a session holds between two chunks: a value that is made anew, saved and restored whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.features import Features
from tachyscope.core.kv_allocation import check_memory, empty_layer, slots_for
from tachyscope.core.plan import Plan
from tachyscope.core.types import PassContext, Rope, Shape, Text
from tachyscope.io.calibration import Calibration
from tachyscope.passes import PassRunner
from tachyscope.replay.runner import runner_of
from tachyscope.store import KVStore, LayerPass


@dataclass(frozen=True, slots=True)
class Source:
    """What a session was opened with; empty in one that was made by hand."""

    weights: str = ""  # this and the next three are hashes
    prompt: str = ""
    first: str = ""  # empty without given frames
    noise: str = ""  # empty where it is drawn
    decoder: str = ""


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """What a session is for; its state may be made anew."""

    shape: Shape
    plan: Plan
    rope: Rope
    device: torch.device
    dtype: torch.dtype
    calibration: Calibration | None = None

    def empty_layer(
        self, slots: int, latent_frames: int | None, host: list[dict[str, Tensor]] | None = None
    ) -> KVStore:
        """One layer's cache; `host` has memory of banks that are gone: page-locking takes long."""
        memory = host.pop() if host else None
        return empty_layer(
            self.plan, self.shape, slots, self.dtype, self.device, latent_frames, memory
        )


class Present(NamedTuple):
    """The pass that runs."""

    ctx: PassContext
    layers: list[LayerPass]  # as their policies are given it
    reads_past: bool = True
    dropped: int = 0  # entries that it drops from the past
    pos: Tensor | None = None
    cos_sin: tuple[Tensor, Tensor] | None = None


class SessionState:
    """All that one rollout remembers."""

    def __init__(
        self,
        spec: SessionSpec,
        latent_frames: int | None,
        lengths: Sequence[int],
        seeds: Sequence[int],
        layers: list[KVStore] | None = None,
        host: list[dict[str, Tensor]] | None = None,
    ) -> None:
        """Of nothing yet, with empty layers unless they are given.

        `latent_frames` is how many are coming, where that is known; `lengths` each row's prompt, in
        entries, in models that hold the prompt in their cache; `seeds` one a video.
        """
        shape, device = spec.shape, spec.device
        self.spec, self.latent_frames = spec, latent_frames
        self.lengths, self.seeds = tuple(lengths), tuple(seeds)
        slots = self.slots_for(lengths)
        if layers is None:
            check_memory(spec.plan, shape, slots, spec.dtype, device, latent_frames)
            layers = [spec.empty_layer(slots, latent_frames, host) for _ in range(shape.layers)]
        self.layers = layers
        # the most past entries of a bounded cache
        self.room = None if spec.plan.cache.grows else slots - shape.max_pass_tokens
        self.prompt = max(lengths, default=0)
        self.left_padding = tuple(self.prompt - n for n in lengths)
        self.chunk = 0  # chunks committed
        self._time = torch.zeros((), dtype=torch.float32, device=device)
        self.latent_frame = 0
        self.past = 0  # entries of finished chunks
        self.now = 0  # entries of the present one
        self.total_entries = 0  # entries an unbounded cache would hold
        self.made = 0  # latent frames generated: given ones are only remembered
        self.begun: set[int] = set()  # passes run over the present chunk
        self.texts: list[Text] = []
        self.text_tokens = 0
        # one a video: each draws the noise that it would draw alone
        drawn_on = torch.device("cpu") if device.type == "meta" else device
        self.generators = [torch.Generator(drawn_on).manual_seed(seed) for seed in seeds]
        # a policy's own draws: sharing the noise's would change the video by being asked
        self.policy_rng = torch.Generator(drawn_on).manual_seed(self.seeds[0])
        self.latents: Tensor | None = None  # of the last finished chunk, or all that was given
        self.features = Features()
        self.passes = PassRunner(spec.plan.passes)
        self.replay = runner_of(spec.plan.replay, spec.calibration)
        origin = torch.tensor(self.lengths or (0,), dtype=torch.float64, device=device)
        self._origin = origin.view(-1, 1, 1, 1)

        self.source = Source()
        # handed in: [draws, latent frames, C, h, w], counted over those that are generated
        self.noise: Tensor | None = None

    def slots_for(self, lengths: Sequence[int]) -> int:
        """A layer's slots where prompts have these lengths; raises where the plan has no room."""
        return slots_for(self.spec.plan, self.spec.shape, lengths, self.latent_frames)

    def bank_memory(self) -> list[dict[str, Tensor]]:
        """Host memory of the layers' banks, for others."""
        return [layer.bank.host for layer in self.layers if layer.bank is not None]

    def anew(self) -> SessionState:
        """A state of nothing yet; this one's layers go, so that two are not in memory at once."""
        host, self.layers = self.bank_memory(), []
        new = SessionState(self.spec, self.latent_frames, self.lengths, self.seeds, host=host)
        new.source, new.noise = self.source, self.noise
        return new

    @property
    def latent_frame(self) -> int:
        """Latent frames committed."""
        return self._latent_frame

    @latent_frame.setter
    def latent_frame(self, value: int) -> None:
        self._latent_frame = value
        self._time.fill_(value)

    @property
    def plain(self) -> bool:
        """Whether every entry in use stands for itself alone, as far as the host knows."""
        cache = self.spec.plan.cache
        # a bounded cache has folded nothing yet
        whole = self.past == self.total_entries and not cache.grows
        coarse = self.layers[0].square is not None
        return not any(self.left_padding) and (whole or not cache.merges) and not coarse

    def context(
        self,
        tokens: int,
        start: int,
        step: int,
        steps: int,
        noise: Sequence[float] = (),
        known: bool = True,
        drafted: bool = False,
    ) -> PassContext:
        """A pass over the present chunk, in the first layer.

        `known`: the passes that have begun ran over all of its tokens.
        """
        return PassContext(
            shape=self.spec.shape,
            layer=0,
            chunk=self.chunk,
            past=self.past,
            start=start,
            tokens=tokens,
            pass_index=step,
            pass_count=steps,
            noise=tuple(noise),
            prompt=self.prompt,
            left_padding=self.left_padding,
            plain=self.plain,
            before=tuple(self.begun) if known else (),
            room=self.room,
            drafted=drafted,
            total=self.total_entries,
        )

    def rotate(self, raw: Tensor, pos: Tensor) -> Tensor:
        """Unrotated keys [B, H, N, D] turned to where pos [B, H or 1, N, 3] says."""
        return self.spec.rope.rotate(raw, pos, self._origin)

    def cos_sin(self, pos: Tensor, frequencies: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """cos and sin [B or 1, 1, S, D] of tokens at pos [S, 3], as `Rope.cos_sin` gives them."""
        return self.spec.rope.cos_sin(pos, self.spec.dtype, self._origin, frequencies)

    def positions(self, frames: int) -> Tensor:
        """(t, y, x) of every token of the next latent frames: [frames * N, 3].

        The time is the device's own number, so that launches recorded once are right for ever.
        """
        pos = self.spec.shape.positions(0, frames, self.spec.device)
        pos[:, 0] += self._time
        return pos

    def prompt_positions(self) -> Tensor:
        """Where the prompt's entries stand, [L, 3]: before frame 0, ending right before it."""
        pos = torch.zeros(self.prompt, 3, dtype=torch.float32, device=self.spec.device)
        pos[:, 0] = -1.0
        first = self.spec.shape.tokens_per_frame - self.prompt
        pos[:, 2] = torch.arange(self.prompt, device=self.spec.device) + first
        return pos

    def count(self, n: int, prefill: bool = False) -> None:
        """The host's numbers after n tokens were committed."""
        self.now, self.total_entries = 0, self.total_entries + n
        if not prefill:
            self.chunk += 1
            self._latent_frame += n // self.spec.shape.tokens_per_frame

    def add_time(self, frames: int) -> None:
        """So many latent frames have passed, on the device."""
        self._time += frames

    def given_noise(self, draw: int, ahead: int = 0) -> Tensor | None:
        """The draw-th noise [1, C, F, h, w] of the next chunk, or of one so many chunks ahead.

        None where it is to be drawn.
        """
        noise = self.noise
        if noise is None or draw >= len(noise):
            return None
        chunk = self.spec.shape.chunk
        start = self.made + ahead * chunk
        part = noise[draw, start : start + chunk]
        if len(part) < chunk:
            raise TachyscopeError(
                f"`noise` was given for {noise.shape[1]} latent frames, and those up to "
                f"{start + chunk} are to be made: give more, or take fewer `frames`"
            )
        return part.transpose(0, 1)[None]

    def forget(self) -> None:
        """Drop every finished entry; the video goes on, and remembers from here."""
        self.past = self.total_entries = 0
        for layer in self.layers:
            layer.truncate(0)

    def rewind(self, frames: int, keep: int) -> None:
        """Drop the newest latent frames, and all before them but the first `keep`.

        A bank keeps no more than its sink: one that would have to keep more is refused.
        """
        tokens = self.spec.shape.tokens_per_frame
        past = self.prompt + keep * tokens
        for layer in self.layers:
            if layer.bank is not None:
                layer.bank.rewind(layer, past)
        self.latent_frame -= frames
        self.past, self.now = past, 0
        self.total_entries -= frames * tokens
        for layer in self.layers:
            layer.truncate(past)
