"""Runs MLPs under a replay policy: what the last frame left, its score, its age and its drift."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tachyscope.kernels.device import host_may_read
from tachyscope.kernels.replay import (
    follow_drift,
    grow_older,
    relative_change,
    replay_gated,
    replay_masked,
    replay_rows,
    temporal_score,
)
from tachyscope.meter import Meter
from tachyscope.replay import Choice, TokenReplay
from tachyscope.types import Mlp, PassContext, Shape

# Rows over which drift is a mean. From 6 to all of a frame's 256 made no difference on Atrium.
DRIFT_ROWS = 16.0


class ReplayRunner:
    """Replays MLP outputs of the last frame as a policy chooses; without one it computes all.

    A pass goes so: `begin`; in every layer `score`, once the keys are rotated, then `mlp`. After
    the chunk's last pass `commit`. Each layer keeps, for every pass over a chunk and every place
    of a latent frame, what the last frame left there:

    output  [passes, B, N, W]       the MLP's output
    age     [passes, B, N]          how often in a row it was replayed
    key     [passes, B, Hkv, N, D]  the rotated key, where the policy scores
    drift   [passes, B, 1, W]       the mean change of computed outputs, where it is followed
    input   [passes, B, N, W]       what the output was computed from, where inputs are compared
    """

    def __init__(self, policy: TokenReplay | None, by_layer: Sequence[TokenReplay] = ()) -> None:
        """by_layer: the policy as every layer has it, where they differ in what they allow."""
        self.policy, self.by_layer = policy, by_layer
        self.ready: set[int] = set()  # passes for which the last chunk left outputs
        self.scores: dict[int, Tensor] = {}  # of the present pass, by layer: [B, S]

    def begin(self) -> None:
        """A pass starts."""
        self.scores = {}

    def score(
        self, own: dict[str, Tensor], ctx: PassContext, q: Tensor, rotated_q: Tensor, k: Tensor
    ) -> None:
        """Score each token against its place one frame back, and keep its rotated key k."""
        if self.policy is None or self.policy.score in ("", "input") or ctx.prefilling:
            return
        kept = _kept(own["key"], ctx, 2)
        if self.ready.issuperset(ctx.chunk_passes):
            query = q if self.policy.score == "mixed" else rotated_q
            self.scores[ctx.layer] = temporal_score(query, _for_tokens(kept, ctx, 2))
        for part, last in zip(kept, _last_frames(k, ctx, 2), strict=True):
            part.copy_(last)

    def mlp(
        self,
        x: Tensor,
        fn: Mlp,
        own: dict[str, Tensor],
        ctx: PassContext,
        meter: Meter,
        rng: torch.Generator,
    ) -> Tensor:
        """fn(x) for x [B, S, W], or less of it where the last frame's output serves."""
        rows = x.shape[:2].numel()
        if self.policy is None or ctx.prefilling:
            count_rows(meter, fn.macs, rows, rows)
            return fn(x)
        outputs, ages = _kept(own["output"], ctx, 1), _kept(own["age"], ctx, 1)
        old = _for_tokens(outputs, ctx, 1)
        ready = self.ready.issuperset(ctx.chunk_passes)
        choice, inputs = None, []
        if self.policy.score == "input":
            inputs = _kept(own["input"], ctx, 1)
            if ready:
                self.scores[ctx.layer] = -relative_change(x, _for_tokens(inputs, ctx, 1))
        # what is given is computed whole: the video rests on it
        if ready and not ctx.given:
            meter.add("rows_eligible", rows)
            choice = self.choose(_for_tokens(ages, ctx, 1), own, ctx, rng)
        y, computed = _run_rows(x, old, choice, fn, meter)
        if self.policy.drift and ready:
            drift = own["drift"][ctx.pass_index]
            y, moved = follow_drift(drift, y, old, computed, DRIFT_ROWS)
            drift.copy_(moved)
        for part, last in zip(outputs, _last_frames(y, ctx, 1), strict=True):
            part.copy_(last)
        for i, part in enumerate(inputs):
            _copy_computed(part, _last_frames(x, ctx, 1)[i], computed, ctx, i)
        for i, age in enumerate(ages):
            grow_older(
                age, computed if isinstance(computed, bool) else _last_frames(computed, ctx, 1)[i]
            )
        return y

    def choose(
        self, age: Tensor, own: dict[str, Tensor], ctx: PassContext, rng: torch.Generator
    ) -> Choice | None:
        """What the policy computes of this pass's tokens, by their scores and ages [B, S]."""
        return self.policy_of(ctx.layer).choose(self.scores.get(ctx.layer), age, own, ctx, rng)

    def policy_of(self, layer: int) -> TokenReplay:
        """The policy as a layer has it."""
        policy = self.by_layer[layer] if self.by_layer else self.policy
        assert policy is not None
        return policy

    def commit(self, passes: set[int]) -> None:
        """The chunk is final, after these passes over it."""
        self.ready |= passes


def token_tensors(
    policy: TokenReplay | None, shape: Shape, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Fixed tensors to keep beside a layer: the policy's own, and those of `ReplayRunner`."""
    if policy is None:
        return {}
    place = (shape.passes, shape.batch, shape.tokens_per_frame)
    kind: dict[str, Any] = {"dtype": dtype, "device": device}
    tensors = policy.tensors(shape, device)
    tensors["output"] = torch.zeros(*place, shape.width, **kind)
    tensors["age"] = torch.zeros(place, dtype=torch.int32, device=device)
    if policy.drift:
        tensors["drift"] = torch.zeros(*place[:2], 1, shape.width, **kind)
    if policy.score == "input":
        tensors["input"] = torch.zeros(*place, shape.width, **kind)
    elif policy.score:
        size = (*place[:2], shape.kv_heads, shape.tokens_per_frame, shape.head_dim)
        tensors["key"] = torch.zeros(size, **kind)
    return tensors


def _run_rows(
    x: Tensor, old: Tensor, choice: Choice | None, fn: Mlp, meter: Meter
) -> tuple[Tensor, Tensor | bool]:
    """Outputs, and which were computed: a mask [B, S], or one bool where all rows agree."""
    rows, gate = x.shape[:2].numel(), None if choice is None else choice.gate
    if gate is not None and not host_may_read(x):
        count_rows(meter, fn.macs, rows, rows)
        meter.add("simulated_rows_replayed", (~gate).sum())
        return replay_masked(x, old, gate, fn), gate
    picked = None if choice is None else choice.rows
    if gate is not None:
        computed = int(gate.count_nonzero())
    else:
        computed = rows if picked is None else picked.numel()
    count_rows(meter, fn.macs, computed, rows)
    # rows that agree, as one alone does, need not be picked out and put back
    if computed == rows:
        return fn(x), True
    if computed == 0:
        return old.clone(), False
    if gate is not None:
        return replay_gated(x, old, gate, fn), gate
    assert picked is not None
    mask = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device).scatter(1, picked, True)
    return replay_rows(x, old, picked, fn), mask


def count_rows(meter: Meter, macs: int, computed: float, rows: int) -> None:
    """Add to the meter what an MLP did of so many rows; some of its neurons are a part of one."""
    meter.add("rows_computed", computed)
    meter.add("rows_replayed", rows - computed)
    meter.add("macs", computed * macs)
    meter.add("mlp_macs", computed * macs)


def _copy_computed(
    kept: Tensor, x: Tensor, computed: Tensor | bool, ctx: PassContext, chunk: int
) -> None:
    """Keep the inputs x [B, N, W] of those rows that were computed."""
    if computed is True:
        kept.copy_(x)
    elif computed is not False:
        kept.copy_(torch.where(_last_frames(computed, ctx, 1)[chunk].unsqueeze(-1), x, kept))


def _kept(x: Tensor, ctx: PassContext, dim: int) -> list[Tensor]:
    """What of a layer's tensor this pass reads and writes: in token models, its tokens' places.

    Else the last latent frame that came to the same noise level, one for each chunk of the pass.
    """
    if ctx.shape.token_by_token:
        return [x[ctx.pass_index].narrow(dim, ctx.start, ctx.tokens)]
    return [x[index] for index in ctx.chunk_passes]


def _for_tokens(kept: list[Tensor], ctx: PassContext, dim: int) -> Tensor:
    """What was kept, as this pass's tokens meet it, along `dim`."""
    frames = 1 if ctx.shape.token_by_token else ctx.tokens // ctx.shape.tokens_per_frame
    # every latent frame of a chunk compares with the same one: the last of the chunk before
    paired = [kept[min(i // ctx.shape.chunk, len(kept) - 1)] for i in range(frames)]
    return paired[0] if frames == 1 else torch.cat(paired, dim)


def _last_frames(x: Tensor, ctx: PassContext, dim: int) -> list[Tensor]:
    """Of this pass's tokens, those that the next frame will meet: in chunk models each last one."""
    if ctx.shape.token_by_token:
        return [x]
    places, chunks = ctx.shape.tokens_per_frame, len(ctx.chunk_passes)
    ends = [ctx.shape.chunk * places * (i + 1) for i in range(chunks - 1)] + [ctx.tokens]
    return [x.narrow(dim, end - places, places) for end in ends]
