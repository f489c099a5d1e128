"""What a session holds between two chunks: set up, saved as tensors by name, and restored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tachyscope.calibration import Calibration
from tachyscope.compile_cache import keep_programs
from tachyscope.errors import TachyscopeError
from tachyscope.layers import check_memory, empty_layer, slots_for
from tachyscope.meter import Meter
from tachyscope.observers import Observer
from tachyscope.passes import PassRunner
from tachyscope.plan import Plan
from tachyscope.replay.runners import runner_of
from tachyscope.state_file import (
    AGAIN,
    COUNTS,
    blocks_of,
    check_blocks,
    check_finite,
    check_range,
    check_tensor,
    generators,
    pack,
    refuse,
    unpack,
    whole_numbers,
)
from tachyscope.store import KVStore
from tachyscope.types import CAMERA, PassContext, Rope, Shape, Text

KEPT = "kept."  # begins the names of what is no layer's


@dataclass(frozen=True, slots=True)
class Source:
    """What a session was opened with; empty in one that was made by hand."""

    weights: str = ""  # this and the next three are hashes
    prompt: str = ""
    first: str = ""  # empty without given frames
    noise: str = ""  # empty where it is drawn
    decoder: str = ""


class State:
    """All that one rollout remembers; `Session` adds the calls that a model makes."""

    def __init__(
        self,
        shape: Shape,
        plan: Plan,
        rope: Rope,
        *,
        latent_frames: int | None = None,
        lengths: Sequence[int] = (),
        seed: int | Sequence[int] = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        observers: Sequence[Observer] = (),
        calibration: Calibration | None = None,
    ) -> None:
        plan.check(shape)
        self.calibration = calibration
        self.observers = tuple(observers)
        self.shape, self.plan, self.rope = shape, plan, rope
        self.latent_frames, self.lengths = latent_frames, tuple(lengths)
        self.seeds = (seed,) if isinstance(seed, int) else tuple(seed)  # one a video
        # with its number: "cuda" and "cuda:0" are one device and not equal
        self.device, self.dtype = torch.empty(0, dtype=dtype, device=device).device, dtype
        if self.device.type == "cuda":
            keep_programs()  # every kernel is built after this
        self.meter = Meter(self.device)
        self.source = Source()
        # handed in: [draws, latent frames, C, h, w], counted over those that are generated
        self.noise: Tensor | None = None
        # host memory of banks that are gone, for those that come: page-locking it takes long
        self._spare: list[dict[str, Tensor]] = []
        self.layers: list[KVStore] = []
        self.reset()

    def slots_for(self, lengths: Sequence[int]) -> int:
        """A layer's slots where prompts have these lengths; raises where the plan has no room."""
        return slots_for(self.plan, self.shape, lengths, self.latent_frames)

    def reset(self) -> None:
        """Forget everything: a new state, not the old one mended."""
        self._begin_anew()
        slots = self.slots_for(self.lengths)
        check_memory(self.plan, self.shape, slots, self.dtype, self.device, self.latent_frames)
        self.layers = [self._empty_layer(slots) for _ in range(self.shape.layers)]

    def drop_layers(self) -> None:
        """Free the layers, so that new ones are not in memory beside them."""
        self._spare = [layer.bank.host for layer in self.layers if layer.bank is not None]
        self.layers.clear()

    def _begin_anew(self) -> None:
        """`reset` of all but the layers."""
        slots = self.slots_for(self.lengths)
        self._room = None if self.plan.cache.grows else slots - self.shape.max_pass_tokens
        self.prompt = max(self.lengths, default=0)
        self.left_padding = tuple(self.prompt - n for n in self.lengths)
        self.chunk = 0  # chunks committed
        self._time = torch.zeros((), dtype=torch.float32, device=self.device)
        self.latent_frame = 0
        self.past = 0  # entries of finished chunks
        self.now = 0  # entries of the present one
        self.total_entries = 0  # entries an unbounded cache would hold
        self.made = 0  # latent frames generated: given ones are only remembered
        self.texts: list[Text] = []
        self.text_tokens = 0
        # one a video: each draws the noise that it would draw alone
        self.generators = [torch.Generator(self.device).manual_seed(seed) for seed in self.seeds]
        # a policy's own draws: sharing the noise's would change the video by being asked
        self.policy_rng = torch.Generator(self.device).manual_seed(self.seeds[0])
        self.latents: Tensor | None = None  # of the last finished chunk, or all that was given
        self.features: dict[str, Tensor] = {}  # what an adapter keeps between chunks
        self._begun: set[int] = set()  # passes run over the present chunk
        self._dropped = 0  # entries that the present pass drops from the past
        self.passes = PassRunner(self.plan.passes)
        self.replay = runner_of(self.plan.replay, self.calibration)
        self._context: PassContext | None = None
        self._reads_past = True  # of the present pass
        self._cos_sin: tuple[Tensor, Tensor] | None = None
        self._pos: Tensor | None = None
        origin = torch.tensor(self.lengths or (0,), dtype=torch.float64, device=self.device)
        self._origin = origin.view(-1, 1, 1, 1)
        self._frequencies = self.rope.frequencies(self.device)
        for observer in self.observers:
            observer.on_open(self)

    def _empty_layer(self, slots: int) -> KVStore:
        memory = self._spare.pop() if self._spare else None
        return empty_layer(
            self.plan, self.shape, slots, self.dtype, self.device, self.latent_frames, memory
        )

    @property
    def latent_frame(self) -> int:
        """Latent frames committed."""
        return self._latent_frame

    @latent_frame.setter
    def latent_frame(self, value: int) -> None:
        self._latent_frame = value
        self._time.fill_(value)

    def positions(self, frames: int) -> Tensor:
        """(t, y, x) of every token of the next latent frames: [frames * N, 3].

        The time is the device's own number, so that launches recorded once are right for ever.
        """
        pos = self.shape.positions(0, frames, self.device)
        pos[:, 0] += self._time
        return pos

    def prompt_positions(self) -> Tensor:
        """Where the prompt's entries stand, [L, 3]: before frame 0, ending right before it."""
        pos = torch.zeros(self.prompt, 3, dtype=torch.float32, device=self.device)
        pos[:, 0] = -1.0
        pos[:, 2] = torch.arange(self.prompt, device=self.device) + (
            self.shape.tokens_per_frame - self.prompt
        )
        return pos

    def given_noise(self, draw: int, ahead: int = 0) -> Tensor | None:
        """The draw-th noise [1, C, F, h, w] of the next chunk, or of one so many chunks ahead.

        None where it is to be drawn.
        """
        if self.noise is None or draw >= len(self.noise):
            return None
        start = self.made + ahead * self.shape.chunk
        part = self.noise[draw, start : start + self.shape.chunk]
        if len(part) < self.shape.chunk:
            raise TachyscopeError(
                f"`noise` was given for {self.noise.shape[1]} latent frames, and those up to "
                f"{start + self.shape.chunk} are to be made: give more, or take fewer `frames`"
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
        past = self.prompt + keep * self.shape.tokens_per_frame
        banks = [(layer, layer.bank) for layer in self.layers if layer.bank is not None]
        for layer, bank in banks:
            bank.rewind(layer, past)
        self.latent_frame -= frames
        self.past, self.now = past, 0
        self.total_entries -= frames * self.shape.tokens_per_frame
        for layer in self.layers:
            layer.truncate(self.past)

    def state(
        self, host: bool = True, kept: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Everything between two chunks, as tensors by name, ready for a safetensors file.

        Without `host` a bank's blocks in host memory are left out: `BlockBank.segment` has them.
        `kept` are tensors of the caller's that go with it.
        """
        if self.now:
            raise TachyscopeError(
                f"a session's state can be taken between chunks, and {self.now} tokens of one are "
                f"under way: finish the chunk first"
            )
        noise = torch.cat([x.get_state() for x in self.generators])
        drawn = {"generator": noise, "policy_rng": self.policy_rng.get_state()}
        blocks = self._host_tensors() if host else {}
        others = {f"{KEPT}{name}": x for name, x in (kept or {}).items()}
        tensors = self._tensors() | blocks | drawn | others
        return pack(tensors, self._shared() | self._counts())

    def restore(
        self,
        state: Mapping[str, Tensor],
        segments: Sequence[Mapping[str, Tensor]] | None = None,
        check: Callable[[Mapping[str, Tensor]], None] | None = None,
    ) -> None:
        """Go on where `state` was taken, in a session of the same model, size, plan and prompt.

        `segments` have a bank's blocks where the state was taken without them, the oldest first. A
        session that has made nothing yet takes them into the host memory that it has.
        All of it is checked and copied before anything changes: a state that does not fit is
        refused, and the session goes on as if it had not been asked. `check` is handed the tensors
        that the caller of `state` gave, and raises where it cannot use them.
        """
        tensors, meta = unpack(state, self._shared())
        keys = tensors.get("layers.0.k")
        slots = keys.shape[2] if keys is not None and keys.dim() == 4 else 0
        self._check_counts(meta, slots)
        if not self.total_entries:  # what an empty bank's memory holds does not matter
            self._spare = [layer.bank.host for layer in self.layers if layer.bank is not None]
        try:
            layers = self._layers_of(tensors, slots, segments)
        finally:
            self._spare = []
        self._check_texts(tensors, meta["texts"])
        if (camera := self.features.get(CAMERA)) is not None:
            check_tensor(tensors, f"features.{CAMERA}", camera, (0, 0))
        rest = {k: x for k, x in tensors.items() if k.startswith(("texts.", "features.", KEPT))}
        for name, x in rest.items():
            check_finite(name, x)
        if check is not None:
            check({k.removeprefix(KEPT): x for k, x in rest.items() if k.startswith(KEPT)})
        rest = {name: x.to(self.device, copy=True) for name, x in rest.items()}
        (*noise, policy_rng) = generators(tensors, self.device, len(meta["seeds"]))
        # from here on nothing can fail
        self._begin_anew()
        for name in COUNTS:
            setattr(self, name, meta[name])
        self.replay.ready, self.seeds = set(meta["ready"]), tuple(meta["seeds"])
        self.layers = layers
        self.texts = [
            Text(rest[f"texts.{i}.k"], rest[f"texts.{i}.v"], rest.get(f"texts.{i}.log_count"))
            for i in range(meta["texts"])
        ]
        self.latents = rest.get(f"{KEPT}latents")
        prefix = "features."
        self.features = {k[len(prefix) :]: x for k, x in rest.items() if k.startswith(prefix)}
        self.generators, self.policy_rng = noise, policy_rng
        self.source = replace(self.source, first=meta["first"])

    def _check_counts(self, meta: Mapping[str, Any], slots: int) -> None:
        """Raise where a state's numbers cannot be."""
        shape, cache, frame = self.shape, self.plan.cache, meta["latent_frame"]
        least = cache.capacity(shape, self.prompt, meta["latent_frames"])
        check_range("slots", slots, least, max(slots, least) if cache.grows else least)
        # every chunk ends latent frames; a change of prompt may count it again
        least = -(-frame // (shape.chunk + shape.rolling_frames))
        check_range("chunk", meta["chunk"], least, 2 * frame + 2)
        entries = self.prompt + shape.max_pass_tokens + frame * shape.tokens_per_frame
        check_range("total_entries", meta["total_entries"], 0, entries)
        room = slots if cache.grows else slots - shape.max_pass_tokens
        check_range("past", meta["past"], 0, min(room, meta["total_entries"]))
        texts = shape.layers if shape.text else 0
        check_range("texts", meta["texts"], len(self.texts), texts)
        tokens = (self.text_tokens, self.text_tokens) if self.texts else (0, shape.text)
        check_range("text_tokens", meta["text_tokens"], *tokens)
        for step in meta["ready"]:
            check_range("ready", step, 0, shape.passes - 1)

    def _layers_of(
        self,
        tensors: Mapping[str, Tensor],
        slots: int,
        segments: Sequence[Mapping[str, Tensor]] | None,
    ) -> list[KVStore]:
        """A state's layers, on the device."""
        like = self._empty_layer(slots)
        ranges = {} if like.bank is None else like.bank.ranges()
        for i in range(self.shape.layers):
            for name, x in like.tensors().items():
                known = ranges.get(name) or whole_numbers(name, slots)
                check_tensor(tensors, f"layers.{i}.{name}", x, known)
            if like.bank is not None:
                used = int(tensors[f"layers.{i}.bank.used"])
                check_blocks(tensors, segments, i, like.bank.host, used)
        layers = [like, *(self._empty_layer(slots) for _ in range(self.shape.layers - 1))]
        # memory that an open stream reserved is inference mode's own
        with torch.inference_mode():
            for i, layer in enumerate(layers):
                for name, x in layer.tensors().items():
                    x.copy_(tensors[f"layers.{i}.{name}"])
                for name, x in layer.host_tensors().items() if segments is None else ():
                    held = tensors[f"layers.{i}.{name}"]
                    x[:, :, : held.shape[2]] = held
                for segment in segments or ():
                    assert layer.bank is not None
                    layer.bank.load_segment(blocks_of(segment, i))
        return layers

    def _check_texts(self, tensors: Mapping[str, Tensor], count: int) -> None:
        """Raise unless a state's prompt has the parts of this session's, or keys and values."""
        own = {k: x for k, x in self._tensors().items() if k.startswith("texts.")}
        for name, x in own.items():
            check_tensor(tensors, name, x, (0, 0))
        for name in [f"texts.{i}.{part}" for i in range(count) for part in ("k", "v")]:
            if name not in tensors:
                refuse(f"lacks {name!r}", AGAIN)

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {f"features.{name}": x for name, x in self.features.items()}
        for i, layer in enumerate(self.layers):
            tensors |= {f"layers.{i}.{name}": x for name, x in layer.tensors().items()}
        for i, text in enumerate(self.texts):
            parts = {"k": text.k, "v": text.v, "log_count": text.log_count}
            tensors |= {f"texts.{i}.{name}": x for name, x in parts.items() if x is not None}
        return tensors if self.latents is None else tensors | {f"{KEPT}latents": self.latents}

    def _host_tensors(self) -> dict[str, Tensor]:
        """What lies in host memory: of a bank the blocks that are in use."""
        tensors = {}
        for i, layer in enumerate(self.layers):
            for name, x in layer.host_tensors().items():
                assert layer.bank is not None
                tensors[f"layers.{i}.{name}"] = x[:, :, : int(layer.bank.tensors["used"])]
        return tensors

    def _shared(self) -> dict[str, Any]:
        """What a session must share with the one whose state it takes over."""
        return {
            "shape": asdict(self.shape),
            "plan": str(self.plan),
            "lengths": self.lengths,
            "dtype": str(self.dtype),
            "weights": self.source.weights,
            "prompt": self.source.prompt,
            "noise": self.source.noise,
            "decoder": self.source.decoder,
        }

    def _counts(self) -> dict[str, Any]:
        counts: dict[str, Any] = {name: getattr(self, name) for name in COUNTS}
        counts |= {"ready": sorted(self.replay.ready), "texts": len(self.texts)}
        counts["seeds"] = list(self.seeds)
        return counts | {"first": self.source.first}
