"""Serves a model's attention and MLP calls by a plan, and remembers between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import final

from torch import Tensor, inf

from tachyscope.kernels.attention import attention
from tachyscope.kernels.launch import take_turns
from tachyscope.kernels.rotary import apply_rotary
from tachyscope.layers import make_room
from tachyscope.observers import Observer
from tachyscope.state import State
from tachyscope.store import KVStore
from tachyscope.store.bank import sum_counters
from tachyscope.store.bank_layout import COUNTERS
from tachyscope.types import DenoisePass, Mlp, PassContext

NO_SPAN: AbstractContextManager[None] = nullcontext()


@final
class Session(State):
    """All state of one rollout. The model is never altered, and sessions can share it.

    An adapter asks `predict` for a denoising pass. It calls `begin` before every pass that runs; in
    it, layer by layer, `attend`, `cross` and `mlp`; and the rollout calls `commit` once the chunk's
    clean pass is done. `latent_frames` is how many latent frames are coming, where that is known;
    `lengths` each row's prompt, in entries, in models that hold the prompt in their cache.
    `observers` are told of every call.
    """

    def watch(self, observer: Observer) -> None:
        """Tell an observer of every call from here on."""
        self.observers = (*self.observers, observer)
        observer.on_open(self)

    def unwatch(self, observer: Observer) -> None:
        self.observers = tuple(x for x in self.observers if x is not observer)

    def _span(self, name: str) -> AbstractContextManager[None]:
        timed = self.observers and any(observer.times for observer in self.observers)
        return self.meter.span(name) if timed else NO_SPAN

    def set_prompt_kv(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], lengths: Sequence[int]
    ) -> None:
        """Cross-attention's keys, values [B, H, L, D] a layer; rows are padding from lengths on."""
        policy = self.plan.text
        assert policy is not None
        self.texts = [policy.prepare(k, v, lengths) for k, v in zip(keys, values, strict=True)]
        self.text_tokens = keys[0].shape[2]

    def predict(self, now: DenoisePass, fn: Callable[[DenoisePass], Tensor]) -> Tensor:
        """A denoising pass's clean estimate: fn's, or one from before where the plan skips it."""
        self.meter.add("passes", 1)
        if self.passes.skips(now):
            assert self.passes.clean is not None
            self.meter.add("passes_skipped", 1)
            tokens = now.x.shape[2] * self.shape.tokens_per_frame
            self.meter.add("pairs_dense", self._dense_pairs(tokens))
        else:
            self.passes.clean = fn(now)
        return self.passes.clean

    @property
    def wants_poses(self) -> bool:
        """Whether `set_poses` must be called before a chunk."""
        return self.plan.cache.wants_poses

    def set_poses(self, poses: Tensor) -> None:
        """Where the camera stands in the latent frames that come next, camera to world:
        [B, F, 3, 4]."""
        cache, total = self.plan.cache, self.total_entries
        for layer in self.layers:
            cache.retrieve_by(layer, self.shape, total, poses, self.meter)

    def begin(
        self,
        pos: Tensor,
        step: int,
        steps: int,
        noise: Sequence[float],
        past: bool = True,
        drafted: bool = False,
    ) -> None:
        """A pass starts, over tokens at pos [S, 3], with each latent frame's noise level.

        In chunk models a pass overwrites the present chunk; in token models it goes on behind it.
        With `past` False the pass reads the present chunk alone. `drafted`: tokens behind the first
        may be taken back.
        """
        tokens, self._reads_past = pos.shape[0], past
        start = self.now if self.shape.token_by_token else 0
        # tokens that have come behind those of the last pass had no pass before
        known = self.shape.token_by_token or tokens <= self.now
        self.now = start + tokens
        self._dropped = 0
        if not self._begun and past:
            left = self.plan.cache.past_in_pass(self.shape, self.past, tokens)
            self._dropped, self.past = self.past - left, left
        self._context = PassContext(
            self.shape, 0, self.chunk, self.past, start, tokens, step, steps, tuple(noise),
            self.prompt, self.left_padding, self._plain, tuple(self._begun) if known else (),
            (0, 0), self._room, drafted, self.total_entries,
        )  # fmt: skip
        make_room(self.layers, self.plan, self._context, self.meter, self._dropped)
        if self.plan.cache.view_depends_on_pass:
            ctx, hidden_slots = self._context, (0, 0)
            for i, layer in enumerate(self.layers):
                hidden_slots = self.plan.cache.hidden_slots(layer, ctx.for_layer(i), self._rotate)
            self._context = ctx._replace(hidden_slots=hidden_slots)
        self._pos = pos.to(self.device)
        self._cos_sin = self.rotation(self._pos)
        self.replay.begin()
        self._begun.update(self._context.chunk_passes)
        self.meter.add("macs", self.shape.batch * tokens * self.shape.macs)
        self.meter.add("pairs_dense", self._dense_pairs(tokens, start, past))
        for observer in self.observers:
            observer.on_pass(self._context)

    def _dense_pairs(self, tokens: int, start: int = 0, past: bool = True) -> int:
        """The pairs that the unbounded dense model scores in a pass, in all its layers."""
        if self.shape.token_by_token:
            seen = tokens * (self.total_entries + start) + tokens * (tokens + 1) // 2
        else:
            seen = tokens * (tokens + (self.total_entries if past else 0))
        return self.shape.batch * self.shape.heads * self.shape.layers * seen

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
            observer.on_attend(ctx, q, k, v, rotated_q, out)
        return out

    def _attend_present(self, q: Tensor, layer: KVStore, ctx: PassContext) -> Tensor:
        """Attention over the present chunk, which no attention policy is asked about."""
        pairs = q.shape[:3].numel() * ctx.tokens
        self.meter.add("pairs", pairs)
        self.meter.add("macs", 2 * pairs * q.shape[3])
        return attention(q, *layer.now(ctx))

    def write_kv(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Put a pass's keys and values behind the past; the rotated queries."""
        assert self._context is not None and self._cos_sin is not None and self._pos is not None
        ctx, here = self._context.for_layer(layer), self.layers[layer]
        for observer in self.observers:
            observer.on_write(ctx, q, k, v)
        written = ctx._replace(past=ctx.past + self._dropped) if self._dropped else ctx
        rotated_k = here.write(written, k, v, self._pos, self._cos_sin, self.rope)
        rotated_q = apply_rotary(None, q, *self._cos_sin, self.rope)
        if self._dropped:
            self.plan.cache.compress(here, written, rotated_q, ctx.past, self._rotate, self.meter)
        if ctx.prefilling:
            for row, pads in enumerate(self.left_padding):
                here.log_count[row, :, :pads] = -inf
        elif self.plan.cache.wants_queries:
            queries = here.own["cache"]["queries"]
            queries[:, :, ctx.start : ctx.start + ctx.tokens] = rotated_q
        self.replay.score(here.own["replay"], ctx, q, rotated_q, rotated_k)
        return rotated_q

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
        ctx, own = self._context.for_layer(layer), self.layers[layer].own["replay"]
        with self._span("mlp"):
            y = self.replay.mlp(x, fn, own, ctx, self.meter, self.policy_rng)
        for observer in self.observers:
            observer.on_mlp(ctx, x, y)
        return y

    def retract(self, n: int) -> None:
        """Drop the newest n tokens of the present frame: drafts that were not right."""
        self.now -= n
        # the dense model would not have come to them
        self.meter.add("pairs_dense", -self._dense_pairs(n, self.now))

    def commit(self, n: int | None = None) -> None:
        """The first n tokens of now (all of them) are final: they become past, within budget."""
        assert self._context is not None
        n = self.now if n is None else n
        prefill, plan = self._context.prefilling, self.plan
        for observer in self.observers:
            observer.on_commit(self._context, n)
        past, kept = 0, self.past if plan.cache.appends else 0
        on_merge = self._on_merge if self.observers else None
        contexts = [self._context.for_layer(i) for i in range(len(self.layers))]
        if not kept:
            with self._span("index"):
                for layer, ctx in zip(self.layers, contexts, strict=True):
                    plan.attention.restore_order(layer, ctx, self.past)
        with self._span("commit"), take_turns(self.device, plan.cache.streams) as turn:
            for i, (layer, ctx) in enumerate(zip(self.layers, contexts, strict=True)):
                with turn(i):
                    layer.append(self.past, n)
                    held = plan.cache.commit(layer, ctx, n, self._rotate, self.meter, on_merge)
                past = max(past, held)
        for i, layer in enumerate(self.layers):
            layer.truncate(past)  # here, so that no pass needs to
            with self._span("index"):
                plan.attention.build_index(layer, contexts[i], past, self.meter, kept)
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

        A full cache moves the same entries each time; replay may take turns; which passes run may
        hang on the latents.
        """
        # noise that is handed in changes from chunk to chunk
        if self.noise is not None or any(observer.host for observer in self.observers):
            return False
        cache, room = self.plan.cache, self._room
        full = room is not None and cache.is_full(self.shape, self.past, room, self.total_entries)
        fixed = self.plan.passes.graph_capturable and not (
            self.shape.token_by_token or self.shape.rolling_frames or cache.view_depends_on_pass
        )
        return full and fixed and not (self.plan.replay is not None and self.plan.replay.turns)

    def count_repeated(self) -> None:
        """A chunk like the last was made and committed by the launches that had made that."""
        self.made += self.shape.chunk
        self._count(self.shape.chunk * self.shape.tokens_per_frame)

    def count_bank(self) -> None:
        """Add to the meter what the device has counted of a bank since it was last asked."""
        banks = [layer.bank for layer in self.layers if layer.bank is not None]
        if not banks:
            return
        counted = dict(zip(COUNTERS, sum_counters(banks), strict=True))
        for name, value in counted.items():
            self.meter.add(name, value)
        megabytes = counted["blocks_fetched"] * (banks[0].block_bytes / 1e6)
        self.meter.add("fetched_mb", megabytes)

    def rotation(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [B or 1, 1, S, D] of tokens at pos [S, 3], as `Rope.cos_sin` gives them."""
        return self.rope.cos_sin(pos, self.dtype, self._origin, self._frequencies)

    def _rotate(self, raw: Tensor, pos: Tensor) -> Tensor:
        return self.rope.rotate(raw, pos, self._origin)
