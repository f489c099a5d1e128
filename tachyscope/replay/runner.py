"""Computes or replays MLPs as a replay policy chooses, and keeps the last frame's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tachyscope.core.types import Mlp, PassContext, Shape
from tachyscope.core.work import Work
from tachyscope.io.calibration import Calibration
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
from tachyscope.kernels.token_gate import GateState, TokenGate, decide, gate_tensors
from tachyscope.replay import ReplayPolicy, RowSelection, TokenReplay
from tachyscope.replay.input import InputReplay
from tachyscope.replay.neuron_runner import NeuronRunner, neuron_tensors
from tachyscope.replay.neurons import NeuronReplay
from tachyscope.store import LayerPass

# rows that drift is a running mean of: 6 to all of a frame's 256 are equally good on Atrium
DRIFT_ROWS = 16.0
BY_ATTENTION = ("rotated", "mixed")


class ReplayRunner:
    """Replays MLP outputs of the last frame as a policy chooses; without a policy it computes all.

    Calls of a pass: `begin`, then in every layer `score` with the rotated keys and `mlp`; after the
    chunk's last pass `commit`. Each layer keeps, for every pass over a chunk and every place of a
    latent frame, from the last frame:

    output  [passes, B, N, W]       the MLP's output
    age     [passes, B, N]          how many times in a row it was replayed
    key     [passes, B, Hkv, N, D]  the rotated key, if the policy scores by attention
    drift   [passes, B, 1, W]       the mean change of computed outputs, if the policy adds it
    input   [passes, B, N, W]       the input of the output, if the policy compares inputs
    """

    def __init__(self, policy: TokenReplay | None, by_layer: Sequence[TokenReplay] = ()) -> None:
        """by_layer: the policy of each layer, if they differ."""
        self.policy, self.by_layer = policy, by_layer
        self.ready: set[int] = set()  # passes with outputs from the last chunk
        self.scores: dict[int, Tensor] = {}  # [B, S] by layer, in the present pass
        # by layer: its tensors and the gate's state on them
        self._states: dict[int, tuple[dict[str, Tensor] | None, GateState | None]] = {}

    def begin(self) -> None:
        """Start a pass."""
        self.scores = {}

    def score(self, p: LayerPass, q: Tensor, rotated_q: Tensor, k: Tensor) -> None:
        """Score each token against its place one frame back, and store its rotated key k."""
        ctx = p.ctx
        if self.policy is None or self.policy.score not in BY_ATTENTION or ctx.prefilling:
            return
        kept = _kept(p.layer.own["replay"]["key"], ctx, 2)
        if self.ready.issuperset(ctx.chunk_passes):
            query = q if self.policy.score == "mixed" else rotated_q
            score = temporal_score(query, _for_tokens(kept, ctx, 2))
            self.scores[ctx.layer] = p.mean_heads(score)
        for part, last in zip(kept, _last_frames(k, ctx, 2), strict=True):
            part.copy_(last)

    def mlp(self, p: LayerPass, x: Tensor, fn: Mlp) -> Tensor:
        """fn(x) for x [B, S, W], with rows of the last frame's output where these are replayed."""
        ctx, work, own = p.ctx, p.work, p.layer.own["replay"]
        rows = x.shape[:2].numel()
        if self.policy is None or ctx.prefilling:
            work.add_mlps(fn.macs, rows, rows)
            return fn(x)
        outputs, ages = _kept(own["output"], ctx, 1), _kept(own["age"], ctx, 1)
        old = _for_tokens(outputs, ctx, 1)
        ready = self.ready.issuperset(ctx.chunk_passes)
        choice, inputs = None, []
        if self.policy.score == "input":
            inputs = _kept(own["input"], ctx, 1)
            if ready:
                self.scores[ctx.layer] = -relative_change(x, _for_tokens(inputs, ctx, 1))
        # given frames are computed whole: the rest of the video depends on them
        if ready and not ctx.given:
            work.rows_eligible += rows
            choice = self.choose(p, _for_tokens(ages, ctx, 1))
        y, computed = _run_rows(x, old, choice, fn, work)
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

    def choose(self, p: LayerPass, age: Tensor) -> RowSelection | None:
        """The tokens of this pass that the policy computes, by their scores and ages [B, S]."""
        ctx, policy = p.ctx, self.policy_of(p.ctx.layer)
        score = self.scores.get(ctx.layer)
        if policy.score == "drawn":
            draws = 1 if ctx.shape.paired else age.shape[0]
            kind: dict[str, Any] = {"dtype": torch.float32, "device": age.device}
            score = torch.rand(draws, ctx.tokens, generator=p.rng, **kind).expand(age.shape)
        if not (policy.score and ctx.shape.token_by_token):
            return policy.choose(p, score, age)
        assert score is not None
        state = self._state(p, policy.token_gate(ctx.shape, ctx.chunk))
        gates = []
        for i in range(ctx.tokens):
            state.place.fill_(ctx.start + i)
            decide(state, score[:, i : i + 1])
            gates.append(state.skip == 0)
        return RowSelection(gate=torch.stack(gates, 1))

    def _state(self, p: LayerPass, gate: TokenGate) -> GateState:
        """The state of a layer's gate, made at its first decision."""
        own, (known, state) = p.layer.own["replay"], self._states.get(p.ctx.layer, (None, None))
        if known is own and state is not None and state.gate == gate:
            return state
        whole: dict[str, Any] = {"dtype": torch.int32, "device": own["age"].device}
        state = GateState.of(
            gate, own,
            limit=torch.full((), gate.limit, dtype=torch.float32, device=whole["device"]),
            place=torch.zeros((), **whole), ready=torch.ones((), **whole),
            skip=torch.zeros(p.ctx.shape.batch, **whole), counts=torch.zeros(2, **whole),
        )  # fmt: skip
        self._states[p.ctx.layer] = own, state
        return state

    def policy_of(self, layer: int) -> TokenReplay:
        """The policy of a layer."""
        policy = self.by_layer[layer] if self.by_layer else self.policy
        assert policy is not None
        return policy

    def commit(self, passes: set[int]) -> None:
        """End a chunk over which these passes ran."""
        self.ready |= passes


def runner_of(
    policy: ReplayPolicy | None, calibration: Calibration | None
) -> ReplayRunner | NeuronRunner:
    """The runner of a policy; without one all MLPs are computed."""
    if isinstance(policy, NeuronReplay):
        return NeuronRunner(policy, calibration)
    if isinstance(policy, InputReplay):
        ready = policy.calibrated(calibration)
        return ReplayRunner(ready, ready.by_layer(calibration))
    assert policy is None or isinstance(policy, TokenReplay)
    return ReplayRunner(policy)


def replay_tensors(
    policy: ReplayPolicy | None, shape: Shape, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """The tensors of a layer that a policy's runner and gate keep."""
    if isinstance(policy, NeuronReplay):
        return neuron_tensors(policy, shape, dtype, device)
    if policy is None:
        return {}
    assert isinstance(policy, TokenReplay)
    place = (shape.passes, shape.batch, shape.tokens_per_frame)
    kind: dict[str, Any] = {"dtype": dtype, "device": device}
    tensors = {}
    if shape.token_by_token:
        gate = policy.token_gate(shape, 0)
        tensors = gate_tensors(gate, shape.batch, shape.tokens_per_frame, device)
    tensors["output"] = torch.zeros(*place, shape.width, **kind)
    tensors["age"] = torch.zeros(place, dtype=torch.int32, device=device)
    if policy.drift:
        tensors["drift"] = torch.zeros(*place[:2], 1, shape.width, **kind)
    if policy.score == "input":
        tensors["input"] = torch.zeros(*place, shape.width, **kind)
    elif policy.score in BY_ATTENTION:
        size = (*place[:2], shape.kv_heads, shape.tokens_per_frame, shape.head_dim)
        tensors["key"] = torch.zeros(size, **kind)
    return tensors


def _run_rows(
    x: Tensor, old: Tensor, choice: RowSelection | None, fn: Mlp, work: Work
) -> tuple[Tensor, Tensor | bool]:
    """Outputs, and which rows were computed: a mask [B, S], or one bool for all."""
    rows, gate = x.shape[:2].numel(), None if choice is None else choice.gate
    if gate is not None and not host_may_read(x):
        work.add_mlps(fn.macs, rows, rows)
        work.simulated_rows_replayed += (~gate).sum()
        return replay_masked(x, old, gate, fn), gate
    picked = None if choice is None else choice.rows
    if gate is not None:
        computed = int(gate.count_nonzero())
    else:
        computed = rows if picked is None else picked.numel()
    work.add_mlps(fn.macs, computed, rows)
    # without a gather and a scatter if all rows are treated alike
    if computed == rows:
        return fn(x), True
    if computed == 0:
        return old.clone(), False
    if gate is not None:
        return replay_gated(x, old, gate, fn), gate
    assert picked is not None
    mask = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device).scatter(1, picked, True)
    return replay_rows(x, old, picked, fn), mask


def _copy_computed(
    kept: Tensor, x: Tensor, computed: Tensor | bool, ctx: PassContext, chunk: int
) -> None:
    """Store the inputs x [B, N, W] of the rows that were computed."""
    if computed is True:
        kept.copy_(x)
    elif computed is not False:
        kept.copy_(torch.where(_last_frames(computed, ctx, 1)[chunk].unsqueeze(-1), x, kept))


def _kept(x: Tensor, ctx: PassContext, dim: int) -> list[Tensor]:
    """The parts of a layer's tensor that this pass reads and writes: in token models the places of
    its tokens, else the last latent frame at the same noise level, for each chunk of the pass."""
    if ctx.shape.token_by_token:
        return [x[ctx.pass_index].narrow(dim, ctx.start, ctx.tokens)]
    return [x[index] for index in ctx.chunk_passes]


def _for_tokens(kept: list[Tensor], ctx: PassContext, dim: int) -> Tensor:
    """The stored frames repeated along `dim`, one for each latent frame of this pass."""
    frames = 1 if ctx.shape.token_by_token else ctx.tokens // ctx.shape.tokens_per_frame
    # every latent frame of a chunk is compared with the last one of the chunk before
    paired = [kept[min(i // ctx.shape.chunk, len(kept) - 1)] for i in range(frames)]
    return paired[0] if frames == 1 else torch.cat(paired, dim)


def _last_frames(x: Tensor, ctx: PassContext, dim: int) -> list[Tensor]:
    """The tokens that the next frame is compared with: in chunk models each chunk's last frame."""
    if ctx.shape.token_by_token:
        return [x]
    places, chunks = ctx.shape.tokens_per_frame, len(ctx.chunk_passes)
    ends = [ctx.shape.chunk * places * (i + 1) for i in range(chunks - 1)] + [ctx.tokens]
    return [x.narrow(dim, end - places, places) for end in ends]
