"""The session: what a model calls for attention and MLPs, served by a plan's policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, inf

from tachyscope.attention import attend
from tachyscope.core.kv_allocation import make_room
from tachyscope.core.meter import NO_SPANS, Meter
from tachyscope.core.observers import Observer, parse_observers
from tachyscope.core.plan import Plan
from tachyscope.core.ranks import Ranks, alone
from tachyscope.core.session_snapshot import read_state, take_state
from tachyscope.core.session_state import Present, SessionSpec, SessionState
from tachyscope.core.types import DenoisePass, Mlp, PassContext, Rope, Shape
from tachyscope.io.calibration import Calibration
from tachyscope.io.programs import keep_programs
from tachyscope.kernels.launch import take_turns
from tachyscope.kernels.rotary import apply_rotary
from tachyscope.store import LayerPass
from tachyscope.store.codec import write_mean_square


@final
class Session:
    """Runs one rollout of a model by a plan; several sessions can share a model.

    A model wraps each denoising pass in `predict`. In every pass that runs it calls `begin`, then
    `attend`, `cross` and `mlp` layer by layer; the stream calls `commit` after the chunk's clean
    pass. `memory` holds all state of the rollout; `observers` are called with every event.
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
        calibration: Calibration | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """`latent_frames`, `lengths` and `seed` are as in `SessionState`; one seed makes one video.

        With `ranks` the shape is that of this rank's share.
        """
        plan = plan.for_shape(shape)
        plan.check(shape)
        # with its index: "cuda" and "cuda:0" are the same device but compare unequal
        device = torch.empty(0, dtype=dtype, device=device).device
        if device.type == "cuda":
            keep_programs()  # every kernel is built after this
        self.spec = SessionSpec(shape, plan, rope, device, dtype, calibration)
        self.shape, self.plan, self.rope, self.device, self.dtype = shape, plan, rope, device, dtype
        self.wants_poses = plan.cache.wants_poses or plan.attention.wants_poses
        self.ranks = ranks
        self._mean_heads = alone if ranks is None else ranks.mean
        self.meter = Meter(device)
        self.work = self.meter.work
        self._set_observers(parse_observers(observers))
        seeds = (seed,) if isinstance(seed, int) else tuple(seed)
        self._set_memory(SessionState(self.spec, latent_frames, lengths, seeds))

    def _set_memory(self, memory: SessionState) -> None:
        self.memory = memory
        self._present: Present | None = None
        for observer in self.observers:
            observer.on_open(self)

    def reset(self) -> None:
        """Forget everything and start over from a new, empty state."""
        self._present = None  # which holds the layers
        self._set_memory(self.memory.restarted())

    def free(self) -> None:
        """Free the cache, the prompt and the latents; counts stay readable."""
        self._present = None  # which holds the layers
        self.memory.free()

    def state(
        self, host: bool = True, kept: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """The state between two chunks as tensors by name: see `take_state`."""
        return take_state(self.memory, host, kept)

    def restore(
        self,
        state: Mapping[str, Tensor],
        segments: Sequence[Mapping[str, Tensor]] | None = None,
        check: Callable[[Mapping[str, Tensor]], None] | None = None,
    ) -> None:
        """Continue from a saved `state`, which is refused if it does not fit: see `read_state`."""
        self._set_memory(read_state(self.memory, state, segments, check))

    def watch(self, observer: Observer) -> None:
        """Add an observer, which is called with every event from now on."""
        self._set_observers((*self.observers, observer))
        observer.on_open(self)

    def unwatch(self, observer: Observer) -> None:
        self._set_observers(tuple(x for x in self.observers if x is not observer))

    def _set_observers(self, observers: tuple[Observer, ...]) -> None:
        self.observers = observers
        timed = any(observer.times for observer in observers)
        self._spans = self.meter if timed else NO_SPANS

    def set_prompt_kv(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], lengths: Sequence[int]
    ) -> None:
        """Set each layer's keys and values [B, H, L, D] of the prompt, padded beyond `lengths`."""
        self.memory.texts = []
        for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
            self.set_prompt_layer(layer, k, v, lengths)

    def set_prompt_layer(self, layer: int, k: Tensor, v: Tensor, lengths: Sequence[int]) -> None:
        """`set_prompt_kv` for one layer; layers must come in order."""
        assert self.plan.text is not None
        if self.ranks is not None and not self.plan.text.query_by_query:
            k, v = self.ranks.own_heads(k), self.ranks.own_heads(v)
        self.memory.texts[layer : layer + 1] = [self.plan.text.prepare(k, v, lengths)]
        self.memory.text_tokens = k.shape[2]

    def predict(self, now: DenoisePass, fn: Callable[[DenoisePass], Tensor]) -> Tensor:
        """A denoising pass's clean estimate x0: fn's, or the previous one if the plan skips it."""
        passes = self.memory.passes
        self.work.passes += 1
        if passes.skips(now):
            tokens = now.x.shape[2] * self.shape.tokens_per_frame
            self.work.skip_pass(self.shape, tokens, self.memory.total_entries)
        else:
            passes.clean = fn(now)
        assert passes.clean is not None
        return passes.clean

    def set_poses(self, poses: Tensor) -> None:
        """Camera-to-world poses [B, F, 3, 4] of the next chunk, needed if `wants_poses`."""
        passes = self.shape.passes
        present = self._enter(self.memory.context(0, 0, passes - 1, passes))
        for p in present.layers:
            for policy in (self.plan.cache, self.plan.attention):
                if policy.wants_poses:
                    policy.before_chunk(p, poses)

    def begin(
        self,
        pos: Tensor,
        step: int,
        steps: int,
        noise: Sequence[float],
        past: bool = True,
        drafted: bool = False,
        unused: int = 0,
    ) -> None:
        """Start a pass over tokens at pos [S, 3]; `noise` has each latent frame's noise level.

        In chunk models a pass overwrites the present chunk; in token models it appends to it.
        With `past` False the pass reads the present chunk alone. `drafted`: tokens after the first
        may be retracted. `unused`: a token's multiply-adds that are saved by a pass that ends in
        its last layer, once keys and values are written.
        """
        memory, plan, tokens, dropped = self.memory, self.plan, pos.shape[0], 0
        start = memory.now if self.shape.token_by_token else 0
        # a wider pass than the last one has tokens that no earlier pass ran over
        known = self.shape.token_by_token or tokens <= memory.now
        memory.now = start + tokens
        if not memory.begun and past:
            left = plan.cache.past_in_pass(self.shape, memory.past, tokens)
            dropped, memory.past = memory.past - left, left
        ctx = memory.context(tokens, start, step, steps, noise, known, drafted)
        present = self._enter(ctx)
        make_room(present.layers, plan, dropped)
        if plan.cache.view_depends_on_pass:
            layers = [
                p._replace(ctx=p.ctx._replace(hidden_slots=plan.cache.hidden_slots(p)))
                for p in present.layers
            ]
            ctx, present = layers[0].ctx, present._replace(ctx=layers[0].ctx, layers=layers)
        pos = pos.to(self.device)
        cos_sin = memory.cos_sin(pos)
        self._present = present._replace(reads_past=past, dropped=dropped, pos=pos, cos_sin=cos_sin)
        memory.replay.begin()
        memory.begun.update(ctx.chunk_passes)
        unused //= self.shape.ranks
        self.work.add_pass(self.shape, tokens, memory.past, memory.total_entries, past, unused)
        for observer in self.observers:
            observer.on_pass(ctx)

    def _enter(self, ctx: PassContext) -> Present:
        """Make this the present pass."""
        more = (self.work, self.memory.rotate, self.memory.policy_rng, self._mean_heads)
        layers = [LayerPass(ctx.for_layer(i), x, *more) for i, x in enumerate(self.memory.layers)]
        self._present = Present(ctx, layers)
        return self._present

    @property
    def present(self) -> Present:
        """The pass that is running, or the last one that ran."""
        assert self._present is not None
        return self._present

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of q [B, H, S, D] over the past and k, v [B, Hkv, S, D]; all unrotated."""
        assert self._present is not None
        p = self._present.layers[layer]
        with self._spans["attend"]:
            rotated_q = self._write(p, q, k, v)
            with self._spans[f"read_{p.ctx.pass_index}"]:
                if self._present.reads_past:
                    out = self.plan.attention.attend(p, rotated_q)
                else:  # the present chunk alone: no policy is involved
                    self.work.add_reads(q, p.ctx.tokens)
                    out = attend(p.ctx.shape, rotated_q, *p.layer.now(p.ctx))
        for observer in self.observers:
            observer.on_attend(p.ctx, q, k, v, rotated_q, out)
        return out

    def write_kv(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write a pass's keys and values behind the past; returns the rotated queries."""
        return self._write(self.present.layers[layer], q, k, v)

    def _write(self, p: LayerPass, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        present, cache, ctx = self._present, self.plan.cache, p.ctx
        assert present is not None and present.cos_sin is not None and present.pos is not None
        for observer in self.observers:
            observer.on_write(ctx, q, k, v)
        written = ctx._replace(past=ctx.past + present.dropped) if present.dropped else ctx
        rotated_k = p.layer.write(written, k, v, present.pos, present.cos_sin, self.rope)
        rotated_q = apply_rotary(None, q, *present.cos_sin, self.rope)
        if present.dropped:
            cache.compress(p._replace(ctx=written), rotated_q, ctx.past)
        if ctx.prompt and ctx.prefilling:
            for row, pads in enumerate(ctx.left_padding):
                p.layer.log_count[row, :, :pads] = -inf
        elif "queries" in p.layer.own["cache"]:  # this policy's commit reads them
            queries = p.layer.own["cache"]["queries"]
            queries[:, :, ctx.start : ctx.start + ctx.tokens] = rotated_q
        if p.layer.square is not None:
            write_mean_square(p.layer.square, rotated_q)
        if self.plan.replay is not None:
            self.memory.replay.score(p, q, rotated_q, rotated_k)
        return rotated_q

    def cross(self, layer: int, q: Tensor) -> Tensor:
        """Attention over the prompt of q [B, H, S, D]."""
        assert self.plan.text is not None
        memory = self.memory
        self.work.text_pairs_dense += q.shape[0] * q.shape[1] * q.shape[2] * memory.text_tokens
        with self._spans["cross"]:
            out = self.plan.text.attend(q, memory.texts[layer], self.work)
        for observer in self.observers:
            observer.on_cross(self.present.layers[layer].ctx, q)
        return out

    def mlp(self, layer: int, x: Tensor, fn: Mlp) -> Tensor:
        """fn(x) for x [B, S, W]; a replay policy may reuse rows of the last frame's output."""
        assert self._present is not None
        p = self._present.layers[layer]
        with self._spans["mlp"]:
            y = self.memory.replay.mlp(p, x, fn)
        for observer in self.observers:
            observer.on_mlp(p.ctx, x, y)
        return y

    def retract(self, n: int) -> None:
        """Drop the newest n tokens of the present frame: rejected drafts."""
        self.memory.now -= n

    def commit(self, n: int | None = None) -> None:
        """Move the present chunk's first n tokens (default: all) to the past, within budget."""
        ctx, plan = self.present.ctx, self.plan
        n = self.memory.now if n is None else n
        for observer in self.observers:
            observer.on_commit(ctx, n)
        past, kept = 0, self.memory.past if plan.cache.appends else 0
        if self.shape.token_by_token:
            self.work.add_tokens(self.shape, n, self.memory.past, self.memory.total_entries)
        on_merge = self._on_merge if self.observers else None
        passes = [p._replace(on_merge=on_merge) for p in self.present.layers]
        if not kept:
            with self._spans["index"]:
                for p in passes:
                    plan.attention.restore_order(p, self.memory.past)
        with self._spans["commit"], take_turns(self.device, plan.cache.streams) as turn:
            for i, p in enumerate(passes):
                with turn(i):
                    p.layer.append(self.memory.past, n, p.mean_heads)
                    held = plan.cache.commit(p, n)
                past = max(past, held)
        for p in passes:
            p.layer.truncate(past)  # here, so that no pass needs to
            with self._spans["index"]:
                plan.attention.build_index(p, past, kept)
        self.memory.commit(past, n, ctx.prefilling)
        for observer in self.observers:
            observer.on_committed()

    def _on_merge(self, ctx: PassContext, source: Tensor, root: Tensor) -> None:
        for observer in self.observers:
            observer.on_merge(ctx, source, root)

    def count_bank(self) -> None:
        """Add to the meter what banks counted on the device, and other ranks' work."""
        if (counted := self.memory.take_bank_work()) is not None:
            self.work.add(counted)
        if self.ranks is not None:
            self.ranks.add_up(self.work)

    @property
    def generators(self) -> list[torch.Generator]:
        """One for each video, from which the model draws its noise."""
        return self.memory.generators

    def positions(self, frames: int) -> Tensor:
        """(t, y, x) of every token of the next latent frames: [frames * N, 3]."""
        return self.memory.positions(frames)
