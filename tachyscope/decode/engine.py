"""Makes a token model's frames: one step a token, the same launches on the same memory each time.

What differs from token to token are numbers on the device: the token's place in its frame, the
slot that its entry goes to, and what the replay gate decides. So a CUDA graph of one step serves
every token, and the host waits for nothing. The session stays the owner of all state: a frame
begins and ends by its `begin` and `commit`, as when the model makes its tokens one by one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tachyscope.attention.dense import Dense
from tachyscope.attention.window import Window as WindowPolicy
from tachyscope.decode.cpu import MAX_ROWS, StepProgram, is_direct
from tachyscope.decode.depth import Depth
from tachyscope.decode.layer import Layers, layer_weights
from tachyscope.decode.neurons import slice_mlp
from tachyscope.decode.parts import DecodeParts
from tachyscope.decode.quantise import bits_of, norm_of, weight_of
from tachyscope.kernels.decode_attention import Entries, Gate, Rotation, Scratch, Step, Window
from tachyscope.kernels.decode_mlp import Error, Kept, run_mlp
from tachyscope.kernels.device import has_decode_kernel
from tachyscope.kernels.gemv import gemv, linear
from tachyscope.kernels.input_gate import InputGate
from tachyscope.kernels.input_gate import Kind as InputKind
from tachyscope.kernels.launch import record
from tachyscope.kernels.sample_code import Draw
from tachyscope.passes.all import All
from tachyscope.plan import spell
from tachyscope.replay import TokenGate
from tachyscope.replay.input import DEAREST, Input
from tachyscope.replay.neurons import NeuronReplay
from tachyscope.replay.runner import DRIFT_ROWS, ReplayRunner
from tachyscope.session import Session


def unsupported(parts: DecodeParts, session: Session) -> str:
    """Why the engine cannot make a session's frames; empty where it can."""
    plan, shape = session.plan, session.shape
    gate = None if plan.replay is None else plan.replay.token_gate(shape, 0)
    drafted = plan.passes.drafts_codes and (
        plan.replay is None
        or (session.device.type != "cpu" and isinstance(plan.replay, NeuronReplay))
    )
    # a launch reads q, k and v, another gate, up and down
    launches = [[x.q, x.k, x.v] for x in parts.layers]
    launches += [[x.up, x.down, *([] if x.gate is None else [x.gate])] for x in parts.layers]
    bits = [{bits_of(linear) for linear in launch} for launch in launches]
    bits += [{bits_of(x.o)} for x in parts.layers]
    reasons = {
        f"attention={spell(plan.attention)} reads other entries for every token": not isinstance(
            plan.attention, Dense | WindowPolicy
        ),
        f"cache={spell(plan.cache)} wants every token's queries": plan.cache.wants_queries
        or plan.cache.view_depends_on_pass,
        f"replay={spell(plan.replay)} is not decided on the device": gate is None
        and not isinstance(plan.replay, NeuronReplay | Input | None),
        f"passes={spell(plan.passes)} drafts what the engine cannot check": not isinstance(
            plan.passes, All
        )
        and not drafted,
        f"store={spell(plan.store)} keeps codes": bool(session.layers[0].scales),
        "its weights are neither floats nor codes that the kernels read": any(
            0 in kinds for kinds in bits
        ),
        "weights of one launch are of several kinds": any(len(kinds) > 1 for kinds in bits),
    }
    if session.device.type == "cpu":
        reasons["a CPU's step is compiled for float32"] = session.dtype != torch.float32
        reasons["a CPU's step reads no int4"] = any(4 in kinds for kinds in bits)
        reasons[f"a CPU's step takes up to {MAX_ROWS} rows"] = shape.batch > MAX_ROWS
    return next((reason for reason, holds in reasons.items() if holds), "")


class DecodeEngine:
    """Makes frames of a session; with `graph` a step is a CUDA graph, on a CPU a program."""

    def __init__(self, parts: DecodeParts, session: Session, graph: bool) -> None:
        self.session, self.graph = session, graph
        shape, rows = session.shape, session.shape.batch
        self.videos = rows // 2 if shape.paired else rows
        kind: dict[str, Any] = {"dtype": session.dtype, "device": session.device}
        self.x, self.hidden = (torch.zeros(rows, shape.width, **kind) for _ in range(2))
        self.norm, self.actions = norm_of(parts.norm), parts.actions
        self.action = torch.zeros_like(self.x)
        self.projector = [weight_of(part) for part in parts.projector]
        self.projected = torch.zeros(rows, self.projector[0].rows, **kind)
        draw = Draw(parts.guided, parts.cfg, parts.temperature, parts.top_k, parts.top_p)
        self.depth = Depth(parts.depth, draw, self.hidden)
        scratch = Scratch(rows, shape.heads, shape.kv_heads, shape.head_dim, session.device)
        self.trunk = Layers([layer_weights(part) for part in parts.layers], self.x, scratch)
        self.barriers = self.trunk.barriers()
        self.neurons = self._slices()
        places, depth, codes = shape.tokens_per_frame, len(parts.depth.positions), parts.depth.codes
        whole: dict[str, Any] = {"dtype": torch.int64, "device": session.device}
        self.codes = torch.zeros(self.videos, places, depth, **whole)
        fine: dict[str, Any] = {"dtype": torch.float32, "device": session.device}
        self.noise = torch.ones(self.videos, places, depth, codes, **fine)
        wide = torch.promote_types(session.dtype, torch.float32)
        angles = (rows, places, shape.head_dim)
        self.cos, self.sin = (
            torch.zeros(angles, dtype=wide, device=session.device) for _ in range(2)
        )
        # the token's place in its frame, and its slot
        self.numbers = torch.zeros(2, dtype=torch.int32, device=session.device)
        self.place, self.slot = self.numbers[0], self.numbers[1]
        self.ready = torch.zeros((), dtype=torch.int32, device=session.device)
        self.value = torch.zeros((), **fine)
        layers = (shape.layers,)
        self.skip = torch.zeros(*layers, rows, dtype=torch.int32, device=session.device)
        self.counts = torch.zeros(*layers, 2, dtype=torch.int32, device=session.device)
        self.luck = torch.zeros(*layers, places, rows, **fine)
        self.ages = torch.zeros(rows, places, dtype=torch.int32, device=session.device)
        self.fade = torch.zeros(rows, **fine)
        # stock torch on a GPU computes all, and masks
        self.skips = session.device.type == "cpu" or has_decode_kernel(self.x)
        self.gate: TokenGate | None = None
        self.memory: list[Tensor] = []  # the layers' tensors that steps read and write
        # a step that computes whole MLPs, and one that computes their slices
        self.recorded: dict[bool, torch.cuda.CUDAGraph | StepProgram] = {}
        self.replayed = False  # whether the last frame was made by the graph alone
        self.drawn = rows * places  # rows of tokens whose codes a frame draws

    def frame(self, noise: Tensor, action: int | Tensor | None = None) -> Tensor:
        """The next frame's codes [V, N, D], from noise [V, N, D, K]; the caller commits it."""
        session, shape = self.session, self.session.shape
        pos = shape.positions(session.latent_frame, 1, session.device)
        past = session.past
        ready = session.replay.ready.issuperset((0,))
        session.begin(pos=pos, step=0, steps=1, noise=(0.0,))
        self.meet_memory()
        cos, sin = session.rotation(pos)
        self.cos.copy_(cos[:, 0])
        self.sin.copy_(sin[:, 0])
        self.noise.copy_(noise)
        self.hidden.copy_(session.features["hidden"])
        self.take_action(action)
        self.place.fill_(0)
        self.slot.fill_(past)
        self.counts.zero_()
        policy = session.plan.replay
        gate = None if policy is None else policy.token_gate(shape, session.chunk)
        if self.judges:
            self.ready.fill_(ready)
        if gate is not None:
            self.ready.fill_(ready)
            self.value.fill_(gate.value)
            if gate.drawn and ready:
                self.draw_luck()
        whole = self.whole_places(ready)
        self.replayed = self.recorded.keys() >= set(whole)
        for one in whole:
            self._next(one)
        self.learn_errors(whole)
        for layer in session.layers:
            layer.pos[:, :, past : past + shape.tokens_per_frame] = pos
        session.features["hidden"] = self.hidden.clone()
        self._count(past, ready, whole)
        return self.codes.clone()

    def take_action(self, action: int | Tensor | None) -> None:
        """The frame's action: one for all videos, or each one's [V, 1]."""
        if self.actions is not None:
            each = self.actions[action].view(-1, self.actions.shape[1])
            self.action.copy_(each.repeat(len(self.action) // len(each), 1))

    def draw_luck(self) -> None:
        """In the order of single passes, token by token and layer by layer."""
        layers, places, rows = self.luck.shape
        size = (places, layers, 1 if self.session.shape.paired else rows)
        rng = self.session.policy_rng
        drawn = torch.rand(size, generator=rng, dtype=torch.float32, device=self.luck.device)
        self.luck.copy_(drawn.transpose(0, 1))

    def _slices(self) -> NeuronReplay | None:
        """Make slices of the MLPs, where the plan's policy computes those."""
        policy, calibration = self.session.plan.replay, self.session.calibration
        if not isinstance(policy, NeuronReplay) or not policy.share:
            return None
        assert calibration is not None  # a prompt's pass has asked for it
        mlps = [layer.mlp for layer in self.trunk.weights]
        cuts = [
            calibration.cut(policy.share, i, mlp.down.dense(self.session.dtype))
            for i, mlp in enumerate(mlps)
        ]
        self.trunk.add_slices(list(map(slice_mlp, mlps, cuts)))
        self.betas = [cut.beta for cut in cuts]
        return policy

    def whole_places(self, ready: bool) -> list[bool]:
        """Of the frame's tokens, those whose MLPs are computed whole, or as a gate decides."""
        session, policy = self.session, self.neurons
        places = session.shape.tokens_per_frame
        if policy is None or (policy.remembers and not ready):
            return [True] * places
        return [policy.whole(session.chunk, place) for place in range(places)]

    def learn_errors(self, whole: list[bool]) -> None:
        """Where whole outputs were left, leave what the slices are off by."""
        if self.neurons is None or not self.neurons.remembers or not any(whole):
            return
        index = torch.tensor([place for place, one in enumerate(whole) if one])
        if self.session.device.type == "cuda":
            # from pinned memory, so that the host does not wait
            index = index.pin_memory().to(self.session.device, non_blocking=True)
        for layer, part in zip(self.session.layers, self.trunk.slices, strict=True):
            error, base = (layer.own["replay"][name][0] for name in ("error", "input"))
            about = run_mlp(base.index_select(1, index), part)
            error.index_copy_(1, index, error.index_select(1, index) - about)

    def step(self, whole: bool = True) -> None:
        """One token: its codes, then the trunk's state that predicts the next."""
        self.depth.step(self.codes, self.noise, self.place)
        gemv(self.projected, self.depth.total, (self.projector[0],), gelu=True)
        gemv(self.x, self.projected, (self.projector[1],))
        if self.actions is not None:
            self.x.add_(self.action)
        self.run_trunk(whole)
        size = (self.x.shape[1],)
        self.hidden.copy_(F.rms_norm(self.x, size, self.norm.weight, self.norm.eps))
        self.numbers.add_(1)

    def embed(self, codes: Tensor) -> Tensor:
        """The trunk's inputs [B * S, W] of a frame's codes [V, S, D]."""
        (first, second), codes = self.projector, codes.flatten(0, 1)
        total = self.depth.books[0][codes[:, 0]]
        for d, book in enumerate(self.depth.books[1:], 1):
            total = total + book[codes[:, d]]
        x = linear(F.gelu(linear(total, first)), second)
        if self.actions is not None:
            x = (x.unflatten(0, (self.videos, -1)) + self.action[: self.videos, None]).flatten(0, 1)
        return x.repeat(len(self.x) // self.videos, 1)

    def run_trunk(self, whole: bool = True) -> None:
        self.barriers.zero_()
        kept = self.kept if whole else self.errors
        self.trunk.step(self.steps, kept, self.barriers, sliced=not whole, judges=self.judges)

    def _next(self, whole: bool) -> None:
        if self.graph and self.session.device.type == "cpu" and whole not in self.recorded:
            self.recorded[whole] = StepProgram(self, whole)
        if whole in self.recorded:
            self.recorded[whole].replay()
            return
        self.step(whole)
        if self.graph:
            self.recorded[whole] = record(lambda: self.step(whole))

    def meet_memory(self) -> None:
        """Point the steps to the session's memory, where that is not the last frame's."""
        session = self.session
        held = [x for layer in session.layers for x in (layer.k, layer.v, layer.log_count)]
        same = len(held) == len(self.memory)
        if same and all(a is b for a, b in zip(held, self.memory, strict=True)):
            return
        self.memory, self.recorded = held, {}
        shape, policy = session.shape, session.plan.replay
        self.gate = None if policy is None else policy.token_gate(shape, 0)
        rotation = Rotation(self.cos, self.sin, session.rope.interleaved)
        window = self._window()
        merged = session.plan.cache.merges or any(session.left_padding)
        self.steps: list[Step] = []
        self.kept: list[Kept | None] = []
        self.errors: list[Error | None] = []
        self.judges: list[InputGate] = []
        for i, layer in enumerate(session.layers):
            gate, kept = self._gate(i) if self.gate is not None else (None, None)
            error = None
            if self.neurons is not None and self.neurons.remembers:
                kept, error = self._memory(i)
            if isinstance(policy, Input):
                kept = self._judge(i)
            log_count = layer.log_count if merged else None
            entries = Entries(layer.k, layer.v, self.slot, log_count, layer.unrotated)
            step = Step(entries, shape.heads, self.place, rotation, window, gate)
            self.steps.append(step)
            self.kept.append(kept)
            self.errors.append(error)

    def _window(self) -> Window | None:
        policy, session = self.session.plan.attention, self.session
        if not isinstance(policy, WindowPolicy):
            return None
        pads = session.left_padding or (0,) * session.shape.batch
        padding = torch.tensor(pads, dtype=torch.int32, device=session.device)
        return Window(policy.sink, policy.tokens, policy.sink + max(pads) + policy.tokens, padding)

    def _gate(self, layer: int) -> tuple[Gate, Kept]:
        own = self.session.layers[layer].own["replay"]
        rule, age = self.gate, own["age"][0]
        assert rule is not None
        scored = rule.kind != "draw"
        gate = Gate(
            rule.kind, self.value, self.ready, self.skip[layer], self.counts[layer], age,
            rule.strict, rule.mixed, rule.tied, rule.age_limit,
            key=own["key"][0] if scored else None,
            recent=own["recent_scores"] if rule.kind == "share" else None,
            due=own["share_due"] if rule.kind == "share" else None, luck=self.luck[layer],
        )  # fmt: skip
        drift = own["drift"][0, :, 0] if "drift" in own else None
        output = own["output"][0]
        return gate, Kept(self.skip[layer], self.place, output, age, drift, self.ready, DRIFT_ROWS)

    def _judge(self, layer: int) -> Kept:
        """What a layer's MLP keeps where its own input decides."""
        own, runner = self.session.layers[layer].own["replay"], self.session.replay
        policy = runner.policy_of(layer) if isinstance(runner, ReplayRunner) else None
        assert isinstance(policy, Input)
        kinds: dict[InputKind, float | None] = {
            "threshold": policy.threshold, "share": policy.share, "budget": policy.budget
        }  # fmt: skip
        kind, limit = next((name, x) for name, x in kinds.items() if x is not None)
        judge = InputGate(
            kind, limit, self.session.shape.paired, DEAREST, self.place, self.ready,
            self.skip[layer], self.counts[layer], own["input"][0], own.get("credit"),
            own.get("recent_scores"), own.get("share_due"),
        )  # fmt: skip
        self.judges.append(judge)
        return Kept(self.skip[layer], self.place, own["output"][0], own["age"][0], ready=self.ready)

    def _memory(self, layer: int) -> tuple[Kept, Error]:
        """What a token that is computed whole leaves, and how one that is not reads it."""
        own = self.session.layers[layer].own["replay"]
        error, base = own["error"][0], own["input"][0]
        # nothing is skipped, and ages are not told
        kept = Kept(self.skip[layer], self.place, error, self.ages, input=base)
        return kept, Error(self.place, error, base, self.betas[layer], self.fade)

    def slice_work(self) -> int:
        """Multiply-adds of a token in a layer's slice."""
        part = self.trunk.slices[0]
        work = sum(x.rows * x.columns for x in part.parts)
        if self.graph and self.session.device.type == "cpu" and is_direct(part):
            work -= part.linear * part.down.rows
        return work

    def _count(self, past: int, ready: bool, whole: list[bool]) -> None:
        """What the frame's passes would have counted one by one; replayed rows are the device's."""
        session, shape = self.session, self.session.shape
        places, meter = shape.tokens_per_frame, session.meter
        self.count_entries([past + i + 1 for i in range(places)])
        total = shape.batch * places * shape.layers
        skipped: Tensor | float = 0.0
        if self.gate is not None or self.judges:
            if ready:
                meter.add("rows_eligible", total)
            skipped, masked = self.counts.sum(0, dtype=torch.float64)
            # beside a row that is computed the weights are read all the same
            if not self.skips:
                skipped, masked = 0.0, skipped + masked
            meter.add("simulated_rows_replayed", masked)
        self.count_mlps(total, total * whole.count(False) / places, ready, skipped)

    def count_entries(self, ends: list[int]) -> None:
        """Attention of tokens that have so many entries, their own the last of them."""
        session, shape = self.session, self.session.shape
        policy = session.plan.attention
        if isinstance(policy, WindowPolicy):
            reach = policy.sink + max(session.left_padding, default=0) + policy.tokens
            ends = [end if end <= reach else policy.sink + policy.tokens for end in ends]
        pairs = shape.batch * shape.heads * shape.layers * sum(ends)
        session.meter.add("pairs", pairs)
        session.meter.add("macs", 2 * pairs * shape.head_dim)

    def count_mlps(
        self, total: int, sliced: float, ready: bool, skipped: Tensor | float = 0.0
    ) -> None:
        """MLPs of so many rows, of which some were slices and some were skipped."""
        mlp, meter = self.trunk.weights[0].mlp, self.session.meter
        macs = sum(part.rows * part.columns for part in mlp.parts)
        if self.neurons is not None:
            part, memory = self.trunk.slices[0], self.neurons.remembers
            work = self.slice_work()
            computed = (part.up.rows - part.linear) / mlp.up.rows  # of a sliced MLP's neurons
            skipped = sliced * (1 - computed)
            # maps, and slices of what was computed whole: errors are learned from them
            more = sliced * (work - computed * macs) + (total - sliced) * work * memory
            meter.add("rows_eligible", total * (ready or not memory))
            meter.add("macs", more)
            meter.add("mlp_macs", more)
        meter.add("rows_computed", total - skipped)
        meter.add("rows_replayed", skipped)
        meter.add("macs", (total - skipped) * macs)
        meter.add("mlp_macs", (total - skipped) * macs)
