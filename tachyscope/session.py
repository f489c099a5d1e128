"""Serves a model's attention and MLP calls by a plan, and remembers between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from tachyscope.compile_cache import keep_programs
from tachyscope.errors import TachyscopeError
from tachyscope.kernels.attention import attention
from tachyscope.kernels.rotary import apply_rotary
from tachyscope.layers import empty_layer, make_room, slots_for
from tachyscope.machine import memory_of
from tachyscope.meter import Meter
from tachyscope.observers import Observer
from tachyscope.plan import Plan
from tachyscope.replay.runner import ReplayRunner
from tachyscope.state import (
    AGAIN,
    COUNTS,
    check_finite,
    check_range,
    check_tensor,
    generators,
    pack,
    refuse,
    unpack,
    whole_numbers,
)
from tachyscope.types import LayerCache, Mlp, PassContext, Rope, Shape, Text

NO_SPAN: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True, slots=True)
class Source:
    """What a session was opened with; empty in one that was made by hand."""

    weights: str = ""  # this and the next three are hashes
    prompt: str = ""
    first: str = ""  # empty without given frames
    noise: str = ""  # empty where it is drawn
    decoder: str = ""


@final
class Session:
    """All state of one rollout. The model is never altered, and sessions can share it.

    An adapter calls `begin` before every pass; in it, layer by layer, `attend`, `cross` and `mlp`;
    and the rollout calls `commit` once the chunk's clean pass is done. `latent_frames` is how many
    latent frames are coming, where that is known; `lengths` each row's prompt, in entries, in
    models that hold the prompt in their cache. `observers` are told of every call.
    """

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
    ) -> None:
        plan.check(shape)
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
        self.reset()

    def slots_for(self, lengths: Sequence[int]) -> int:
        """A layer's slots where prompts have these lengths; raises where the plan has no room."""
        return slots_for(self.plan, self.shape, lengths, self.latent_frames)

    def reset(self) -> None:
        """Forget everything: a new state, not the old one mended."""
        self._begin_anew()
        slots = self.slots_for(self.lengths)
        self._check_memory(slots)
        self.layers = [self._empty_layer(slots) for _ in range(self.shape.layers)]

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
        self.replay = ReplayRunner(self.plan.replay)
        self._context: PassContext | None = None
        self._reads_past = True  # of the present pass
        self._cos_sin: tuple[Tensor, Tensor] | None = None
        self._pos: Tensor | None = None
        origin = torch.tensor(self.lengths or (0,), dtype=torch.float64, device=self.device)
        self._origin = origin.view(-1, 1, 1, 1)
        self._frequencies = self.rope.frequencies(self.device)
        for observer in self.observers:
            observer.on_open(self)

    def watch(self, observer: Observer) -> None:
        """Tell an observer of every call from here on."""
        self.observers = (*self.observers, observer)
        observer.on_open(self)

    def unwatch(self, observer: Observer) -> None:
        self.observers = tuple(x for x in self.observers if x is not observer)

    def _span(self, name: str) -> AbstractContextManager[None]:
        timed = self.observers and any(observer.times for observer in self.observers)
        return self.meter.span(name) if timed else NO_SPAN

    def _check_memory(self, slots: int) -> None:
        """Raise where keys and values of so many slots are more than the device's whole memory.

        The system itself may grant what it does not have, and end the process when it is used.
        """
        shape, limit = self.shape, memory_of(self.device)
        numbers = 2 * shape.layers * shape.batch * shape.kv_heads * slots * shape.head_dim
        if limit is not None and numbers * self.dtype.itemsize > limit:
            raise TachyscopeError(
                f"the memory of {self.device} does not hold the cache of {self.plan}: "
                f"{numbers * self.dtype.itemsize / 1e9:.3g} GB of {limit / 1e9:.3g}: give it a "
                f"budget, for example cache=merge:budget=21f, or take fewer `frames` or a smaller "
                f"`size`; tachyscope bench fit tells what fits"
            )

    def _empty_layer(self, slots: int) -> LayerCache:
        return empty_layer(self.plan, self.shape, slots, self.dtype, self.device)

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

    def set_prompt_kv(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], lengths: Sequence[int]
    ) -> None:
        """Cross-attention's keys, values [B, H, L, D] a layer; rows are padding from lengths on."""
        policy = self.plan.text
        assert policy is not None
        self.texts = [policy.prepare(k, v, lengths) for k, v in zip(keys, values, strict=True)]
        self.text_tokens = keys[0].shape[2]

    def begin(
        self, pos: Tensor, step: int, steps: int, noise: Sequence[float], past: bool = True
    ) -> None:
        """A pass starts, over tokens at pos [S, 3], with each latent frame's noise level.

        In chunk models a pass overwrites the present chunk; in token models it goes on behind it.
        With `past` False the pass reads the present chunk alone.
        """
        tokens, self._reads_past = pos.shape[0], past
        start = self.now if self.shape.token_by_token else 0
        # tokens that have come behind those of the last pass had no pass before
        known = self.shape.token_by_token or tokens <= self.now
        self.now = start + tokens
        self._context = PassContext(
            self.shape, 0, self.chunk, self.past, start, tokens, step, steps, tuple(noise),
            self.prompt, self.left_padding, self._plain, tuple(self._begun) if known else (),
            (0, 0), self._room,
        )  # fmt: skip
        make_room(self.layers, self.plan, self._context, self.meter)
        if self.plan.cache.view_depends_on_pass:
            ctx, hidden_slots = self._context, (0, 0)
            for i, layer in enumerate(self.layers):
                hidden_slots = self.plan.cache.hidden_slots(layer, ctx.for_layer(i), self._rotate)
            self._context = ctx._replace(hidden_slots=hidden_slots)
        self._pos = pos.to(self.device)
        self._cos_sin = self.rope.cos_sin(self._pos, self.dtype, self._origin, self._frequencies)
        self.replay.begin()
        self._begun.update(self._context.chunk_passes)
        rows = self.shape.batch
        self.meter.add("macs", rows * tokens * self.shape.macs)
        # entries that the unbounded dense model would score in this pass, in all its layers
        if self.shape.token_by_token:
            seen = tokens * (self.total_entries + start) + tokens * (tokens + 1) // 2
        else:
            seen = tokens * (tokens + (self.total_entries if past else 0))
        self.meter.add("pairs_dense", rows * self.shape.heads * self.shape.layers * seen)
        for observer in self.observers:
            observer.on_pass(self._context)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention over past and now of q [B, H, S, D], k, v [B, Hkv, S, D], all unrotated."""
        assert self._context is not None
        ctx = self._context.for_layer(layer)
        here = self.layers[layer]
        with self._span("attend"):
            rotated_q = self.write_kv(layer, q, k, v)
            with self._span(f"read_{ctx.pass_index}"):
                if self._reads_past:
                    out = self.plan.attention.attend(rotated_q, here, ctx, self.meter)
                else:
                    out = self._attend_present(rotated_q, here, ctx)
        for observer in self.observers:
            observer.on_attend(ctx, q, k, v, rotated_q)
        return out

    def _attend_present(self, q: Tensor, layer: LayerCache, ctx: PassContext) -> Tensor:
        """Attention over the present chunk, which no attention policy is asked about."""
        pairs = q.shape[:3].numel() * ctx.tokens
        self.meter.add("pairs", pairs)
        self.meter.add("macs", 2 * pairs * q.shape[3])
        now = slice(ctx.past, ctx.end)
        return attention(q, layer.k[:, :, now], layer.v[:, :, now])

    def write_kv(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Put a pass's keys and values behind the past; the rotated queries."""
        assert self._context is not None and self._cos_sin is not None and self._pos is not None
        ctx, here = self._context.for_layer(layer), self.layers[layer]
        for observer in self.observers:
            observer.on_write(ctx, q, k, v)
        slots = slice(ctx.past + ctx.start, ctx.end)
        turned_k = apply_rotary(here.k[:, :, slots], k, *self._cos_sin, self.rope)
        turned_q = apply_rotary(None, q, *self._cos_sin, self.rope)
        here.v[:, :, slots] = v
        here.pos[:, :, slots] = self._pos
        if here.unrotated is not None:
            here.unrotated[:, :, slots] = k
        if ctx.prefilling:
            for row, pads in enumerate(self.left_padding):
                here.log_count[row, :, :pads] = -torch.inf
        elif self.plan.cache.wants_queries:
            here.extra["queries"][:, :, ctx.start : ctx.start + ctx.tokens] = turned_q
        self.replay.score(here.extra, ctx, q, turned_q, turned_k)
        return turned_q

    @property
    def _plain(self) -> bool:
        """Whether every entry in use stands for itself alone, as far as the host knows."""
        cache = self.plan.cache
        whole = (
            self.past == self.total_entries and not cache.grows
        )  # a bounded cache has folded nothing yet
        return not any(self.left_padding) and (whole or not cache.merges)

    def cross(self, layer: int, q: Tensor) -> Tensor:
        """Attention over the prompt of q [B, H, S, D]."""
        assert self.plan.text is not None and self._context is not None
        self.meter.add("text_pairs_dense", q.shape[:3].numel() * self.text_tokens)
        with self._span("cross"):
            out = self.plan.text.attend(q, self.texts[layer], self.meter)
        for observer in self.observers:
            observer.on_cross(self._context.for_layer(layer), q)
        return out

    def mlp(self, layer: int, x: Tensor, fn: Mlp) -> Tensor:
        """fn(x) for x [B, S, W], or less of it where the last frame's output serves."""
        assert self._context is not None
        ctx, own = self._context.for_layer(layer), self.layers[layer].extra
        with self._span("mlp"):
            y = self.replay.mlp(x, fn, own, ctx, self.meter, self.policy_rng)
        for observer in self.observers:
            observer.on_mlp(ctx, x, y)
        return y

    def commit(self, n: int | None = None) -> None:
        """The first n tokens of now (all of them) are final: they become past, within budget."""
        assert self._context is not None
        n = self.now if n is None else n
        prefill, plan = self._context.prefilling, self.plan
        for observer in self.observers:
            observer.on_commit(self._context, n)
        past, kept = 0, self.past if plan.cache.appends else 0
        on_merge = self._on_merge if self.observers else None
        for i, layer in enumerate(self.layers):
            ctx = self._context.for_layer(i)
            if not kept:
                with self._span("index"):
                    plan.attention.restore_order(layer, ctx, self.past)
            with self._span("commit"):
                held = plan.cache.commit(layer, ctx, n, self._rotate, self.meter, on_merge)
            past = max(past, held)
        for i, layer in enumerate(self.layers):
            layer.log_count[:, :, past:] = 0.0  # here, so that no pass needs to
            with self._span("index"):
                plan.attention.build_index(
                    layer, self._context.for_layer(i), past, self.meter, kept
                )
        self.past = past
        if not prefill:
            self._time += n // self.shape.tokens_per_frame
            self.replay.commit(self._begun)
        self._count(n, prefill)
        self._begun = set()
        for observer in self.observers:
            observer.on_committed()

    def _on_merge(self, ctx: PassContext, source: Tensor, root: Tensor) -> None:
        for observer in self.observers:
            observer.on_merge(ctx, source, root)

    def _count(self, n: int, prefill: bool = False) -> None:
        """The host's numbers after n tokens were committed."""
        self.now, self.total_entries = 0, self.total_entries + n
        if not prefill:
            self.chunk += 1
            self._latent_frame += n // self.shape.tokens_per_frame

    @property
    def graph_capturable(self) -> bool:
        """Whether the next chunk asks the device for just what the last one did.

        A full cache moves the same entries each time; replay may take turns.
        """
        # noise that is handed in changes from chunk to chunk
        if self.noise is not None or any(observer.host for observer in self.observers):
            return False
        full = self._room is not None and self.past == self._room
        fixed = not (
            self.shape.token_by_token
            or self.shape.rolling_frames
            or self.plan.cache.view_depends_on_pass
        )
        return full and fixed and not (self.plan.replay is not None and self.plan.replay.turns)

    def count_repeated(self) -> None:
        """A chunk like the last was made and committed by the launches that had made that."""
        self.made += self.shape.chunk
        self._count(self.shape.chunk * self.shape.tokens_per_frame)

    def forget(self) -> None:
        """Drop every finished entry; the video goes on, and remembers from here."""
        self.past = self.total_entries = 0
        for layer in self.layers:
            layer.log_count.zero_()

    def rewind(self, frames: int, keep: int) -> None:
        """Drop the newest latent frames, and all before them but the first `keep`."""
        self.latent_frame -= frames
        self.past, self.now = self.prompt + keep * self.shape.tokens_per_frame, 0
        self.total_entries -= frames * self.shape.tokens_per_frame
        for layer in self.layers:
            layer.log_count[:, :, self.past :] = 0.0

    @torch.inference_mode()
    def fill(self, frames: int) -> None:
        """Remember latent frames of random keys and values, up to `frames` in all, for a clock.

        What a chunk costs hangs on how many entries there are, not on what they hold.
        """
        shape = self.shape
        if self.plan.cache.grows:
            self._check_memory(self.prompt + frames * shape.tokens_per_frame)
        rng = torch.Generator(self.device).manual_seed(self.seeds[0] + self.latent_frame)

        def draw(heads: int, tokens: int) -> Tensor:
            size = (shape.batch, heads, tokens, shape.head_dim)
            return torch.randn(size, generator=rng, dtype=self.dtype, device=self.device)

        while self.latent_frame < frames:
            pos = shape.positions(self.latent_frame, shape.chunk, self.device)
            self.begin(pos, shape.passes - 1, shape.passes, (0.0,) * shape.chunk)
            for i in range(shape.layers):
                q, k, v = (draw(h, len(pos)) for h in (shape.heads, *[shape.kv_heads] * 2))
                self.write_kv(i, q, k, v)
            self.commit()
        self.made = frames  # what is timed next is no video's first chunk
        self.meter.take()

    def _rotate(self, raw: Tensor, pos: Tensor) -> Tensor:
        return self.rope.rotate(raw, pos, self._origin)

    def state(self) -> dict[str, Tensor]:
        """Everything between two chunks, as tensors by name, ready for a safetensors file."""
        if self.now:
            raise TachyscopeError(
                f"a session's state can be taken between chunks, and {self.now} tokens of one are "
                f"under way: finish the chunk first"
            )
        noise = torch.cat([x.get_state() for x in self.generators])
        drawn = {"generator": noise, "policy_rng": self.policy_rng.get_state()}
        return pack(self._tensors() | drawn, self._shared() | self._counts())

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on where `state` was taken, in a session of the same model, size, plan and prompt.

        All of it is checked and copied before anything changes: a state that does not fit is
        refused, and the session goes on as if it had not been asked.
        """
        tensors, meta = unpack(state, self._shared())
        keys = tensors.get("layers.0.k")
        slots = keys.shape[2] if keys is not None and keys.dim() == 4 else 0
        self._check_counts(meta, slots)
        layers = self._layers_of(tensors, slots)
        self._check_texts(tensors, meta["texts"])
        rest = {k: x for k, x in tensors.items() if k.startswith(("texts.", "features.", "kept."))}
        for name, x in rest.items():
            check_finite(name, x)
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
        self.latents = rest.get("kept.latents")
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

    def _layers_of(self, tensors: Mapping[str, Tensor], slots: int) -> list[LayerCache]:
        """A state's layers, on the device."""
        like = self._empty_layer(slots)
        for i in range(self.shape.layers):
            for name, x in (like.entries() | like.extra).items():
                check_tensor(tensors, f"layers.{i}.{name}", x, whole_numbers(name, slots))
        found = [like, *(self._empty_layer(slots) for _ in range(self.shape.layers - 1))]
        for i, layer in enumerate(found):
            for name, x in (layer.entries() | layer.extra).items():
                x.copy_(tensors[f"layers.{i}.{name}"])
        return found

    def _check_texts(self, tensors: Mapping[str, Tensor], count: int) -> None:
        """Raise unless a state's prompt has the parts of this session's, or keys and values."""
        own = {k: x for k, x in self._tensors().items() if k.startswith("texts.")}
        for name, x in own.items():
            check_tensor(tensors, name, x, (0, 0))
        for name in [f"texts.{i}.{part}" for i in range(count) for part in ("k", "v")]:
            if name not in tensors:
                refuse(f"lacks {name!r}", AGAIN)

    def _tensors(self) -> dict[str, Tensor]:
        found = {f"features.{name}": x for name, x in self.features.items()}
        for i, layer in enumerate(self.layers):
            held = layer.entries() | layer.extra
            found |= {f"layers.{i}.{name}": x for name, x in held.items()}
        for i, text in enumerate(self.texts):
            parts = {"k": text.k, "v": text.v, "log_count": text.log_count}
            found |= {f"texts.{i}.{name}": x for name, x in parts.items() if x is not None}
        return found if self.latents is None else found | {"kept.latents": self.latents}

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
        found: dict[str, Any] = {name: getattr(self, name) for name in COUNTS}
        found |= {"ready": sorted(self.replay.ready), "texts": len(self.texts)}
        found["seeds"] = list(self.seeds)
        return found | {"first": self.source.first}

    def cache_bytes(self) -> int:
        """What the layers' tensors take."""
        held = (
            x for layer in self.layers for x in (*layer.entries().values(), *layer.extra.values())
        )
        return sum(x.numel() * x.element_size() for x in held)

    def used_bytes(self) -> int:
        """Of these, what entries of the past take, and the slots of the chunk that comes next."""
        slots = self.layers[0].k.shape[2]
        share = min(1.0, (self.past + self.shape.max_pass_tokens) / slots)
        found = 0.0
        for layer in self.layers:
            held = layer.entries() | layer.extra
            by_slot = layer.entries().keys() | {x for x in layer.extra if x.startswith("slot_")}
            for name, x in held.items():
                size = x.numel() * x.element_size()
                found += share * size if name in by_slot else size
        return round(found)
