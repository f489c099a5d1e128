"""The state of a rollout between two chunks: made, saved and restored as one value."""

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
from tachyscope.core.work import Work
from tachyscope.io.calibration import Calibration
from tachyscope.passes import PassRunner
from tachyscope.replay.runner import runner_of
from tachyscope.store import KVStore, LayerPass
from tachyscope.store.bank_layout import COUNTERS
from tachyscope.store.host_bank import take_counters


@dataclass(frozen=True, slots=True)
class Source:
    """Hashes of what a session was opened with; empty in one made without `open`."""

    weights: str = ""
    prompt: str = ""
    first: str = ""  # empty without given frames
    noise: str = ""  # empty if the seed draws it
    decoder: str = ""  # its name


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """What does not change during a session, and is needed to make its state."""

    shape: Shape
    plan: Plan
    rope: Rope
    device: torch.device
    dtype: torch.dtype
    calibration: Calibration | None = None

    def empty_layer(
        self, slots: int, latent_frames: int | None, host: list[dict[str, Tensor]] | None = None
    ) -> KVStore:
        """One layer's cache; `host` has freed banks' memory to use again: page-locking is slow."""
        memory = host.pop() if host else None
        return empty_layer(
            self.plan, self.shape, slots, self.dtype, self.device, latent_frames, memory
        )


class Present(NamedTuple):
    """The running pass."""

    ctx: PassContext
    layers: list[LayerPass]  # what each layer's policies receive
    reads_past: bool = True
    dropped: int = 0  # entries that the pass drops from the past
    pos: Tensor | None = None
    cos_sin: tuple[Tensor, Tensor] | None = None


class SessionState:
    """All state of one rollout."""

    def __init__(
        self,
        spec: SessionSpec,
        latent_frames: int | None,
        lengths: Sequence[int],
        seeds: Sequence[int],
        layers: list[KVStore] | None = None,
        host: list[dict[str, Tensor]] | None = None,
    ) -> None:
        """An empty state; `layers` are allocated unless they are given.

        `latent_frames` is the rollout's length, None if unknown. `lengths` are the prompt lengths
        of each row in entries, for models that hold the prompt in their cache. `seeds` has one for
        each video. `host` is memory of freed banks.
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
        self.made = 0  # latent frames generated; given ones do not count
        self.begun: set[int] = set()  # indices of the passes run over the present chunk
        self.texts: list[Text] = []
        self.text_tokens = 0
        # one for each video, so that a video of a batch has the noise it would have alone
        drawn_on = torch.device("cpu") if device.type == "meta" else device
        self.generators = [torch.Generator(drawn_on).manual_seed(seed) for seed in seeds]
        # for policies: draws from the noise's generators would change the video
        self.policy_rng = torch.Generator(drawn_on).manual_seed(self.seeds[0])
        self.latents: Tensor | None = None  # of the last finished chunk, or all given latents
        self.features = Features()
        self.passes = PassRunner(spec.plan.passes)
        self.replay = runner_of(spec.plan.replay, spec.calibration)
        origin = torch.tensor(self.lengths or (0,), dtype=torch.float64, device=device)
        self._origin = origin.view(-1, 1, 1, 1)
        self._frequencies = spec.rope.frequencies(device)
        self.source = Source()
        # given noise [draws, latent frames, C, h, w]; its first frame is the first generated one
        self.noise: Tensor | None = None

    def slots_for(self, lengths: Sequence[int]) -> int:
        """A layer's slots for prompts of these lengths; raises if the plan has no room for them."""
        return slots_for(self.spec.plan, self.spec.shape, lengths, self.latent_frames)

    def bank_memory(self) -> list[dict[str, Tensor]]:
        """Host memory of the layers' banks."""
        return [layer.bank.host for layer in self.layers if layer.bank is not None]

    def take_bank_work(self) -> Work | None:
        """What the layers' banks counted on the device since the last call."""
        banks = [layer.bank for layer in self.layers if layer.bank is not None]
        if not banks:
            return None
        counted = Work(**dict(zip(COUNTERS, take_counters(banks), strict=True)))
        counted.fetched_mb = counted.blocks_fetched * (banks[0].block_bytes / 1e6)
        return counted

    def free(self) -> None:
        """Free the cache, the prompt and the latents; counts stay."""
        self.free_layers()
        self.texts.clear()
        self.features, self.latents = Features(), None
        self.passes = PassRunner(self.spec.plan.passes)

    def free_layers(self) -> list[dict[str, Tensor]]:
        """Free the layers; returns the host memory of their banks."""
        host = self.bank_memory()
        for layer in self.layers:
            if layer.bank is not None:
                layer.bank.wait_for_copies()
        self.layers.clear()  # in place: others hold this list
        self.replay = runner_of(self.spec.plan.replay, self.spec.calibration)
        return host

    def restarted(self) -> SessionState:
        """An empty state; this one's layers are freed first, so that memory holds one cache."""
        host = self.free_layers()
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
        """Whether no entry in use is a merged one, as far as the host knows."""
        cache = self.spec.plan.cache
        # a bounded cache that has merged nothing yet
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
        """The context of a pass over the present chunk, in the first layer.

        `known`: the passes in `begun` ran over all of these tokens.
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
        """Unrotated keys [B, H, N, D], rotated to positions pos [B, H or 1, N, 3]."""
        return self.spec.rope.rotate(raw, pos, self._origin)

    def cos_sin(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [B or 1, 1, S, D] of tokens at pos [S, 3], as `Rope.cos_sin` gives them."""
        return self.spec.rope.cos_sin(pos, self.spec.dtype, self._origin, self._frequencies)

    def positions(self, frames: int) -> Tensor:
        """(t, y, x) of every token of the next latent frames: [frames * N, 3].

        The time is read from a tensor on the device, so that a CUDA graph stays valid.
        """
        pos = self.spec.shape.positions(0, frames, self.spec.device)
        pos[:, 0] += self._time
        return pos

    def prompt_positions(self) -> Tensor:
        """Positions of the prompt's entries [L, 3], which end right before frame 0."""
        pos = torch.zeros(self.prompt, 3, dtype=torch.float32, device=self.spec.device)
        pos[:, 0] = -1.0
        first = self.spec.shape.tokens_per_frame - self.prompt
        pos[:, 2] = torch.arange(self.prompt, device=self.spec.device) + first
        return pos

    def commit(self, past: int, n: int, prompt: bool) -> None:
        """After n tokens became part of the `past`: of a prompt, or of a chunk."""
        self.past = past
        if not prompt:
            self._time += n // self.spec.shape.tokens_per_frame
            self.replay.commit(self.begun)
        self.count(n, prompt)
        self.begun = set()

    def count(self, n: int, prompt: bool = False) -> None:
        """Advance the host's counters by n committed tokens, but not the device's time."""
        self.now, self.total_entries = 0, self.total_entries + n
        if not prompt:
            self.chunk += 1
            self._latent_frame += n // self.spec.shape.tokens_per_frame

    def given_noise(self, draw: int, ahead: int = 0) -> Tensor | None:
        """The given noise [1, C, F, h, w] of a draw, for the chunk `ahead` of the next one.

        None if this draw's noise was not given, and comes from the seed.
        """
        noise = self.noise
        if noise is None or draw >= len(noise):
            return None
        chunk = self.spec.shape.chunk
        start = self.made + ahead * chunk
        part = noise[draw, start : start + chunk]
        if len(part) < chunk:
            raise TachyscopeError(
                f"`noise` was given for {noise.shape[1]} latent frames, and this chunk needs "
                f"{start + chunk}: give more, or take fewer `frames`"
            )
        return part.transpose(0, 1)[None]

    def forget(self) -> None:
        """Drop every finished entry; the video continues with an empty past."""
        self.past = self.total_entries = 0
        for layer in self.layers:
            layer.truncate(0)

    def rewind(self, frames: int, keep: int) -> None:
        """Set the time back by `frames`, and drop all latent frames but the first `keep`.

        A bank can keep no more than its sink: a larger `keep` is refused.
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
