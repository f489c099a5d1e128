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
from tachyscope.attention.window import WindowAttention
from tachyscope.core.plan import spell
from tachyscope.core.session import Session
from tachyscope.decode.cpu import is_direct
from tachyscope.decode.cpu_library import MAX_ROWS
from tachyscope.decode.depth import Depth
from tachyscope.decode.layer import Layers, layer_weights
from tachyscope.decode.neurons import slice_mlp
from tachyscope.decode.parts import DecodeParts
from tachyscope.decode.program import TokenStep
from tachyscope.decode.quantise import bits_of, norm_of, weight_of
from tachyscope.kernels.decode_attention import Entries, Rotation, Scratch, Step, Window
from tachyscope.kernels.decode_mlp import Error, Kept, run_mlp
from tachyscope.kernels.device import has_decode_kernel
from tachyscope.kernels.gemv import linear
from tachyscope.kernels.sample_code import Draw
from tachyscope.kernels.token_gate import GateState, TokenGate
from tachyscope.passes.all import AllPasses
from tachyscope.replay.neurons import NeuronReplay
from tachyscope.replay.runner import DRIFT_ROWS, ReplayRunner


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
            plan.attention, Dense | WindowAttention
        ),
        f"attention={spell(plan.attention)} weighs the past": plan.attention.log_weight != 0,
        f"cache={spell(plan.cache)} wants every token's queries": plan.cache.wants_queries,
        f"cache={spell(plan.cache)} says itself what a pass reads": plan.cache.view_depends_on_pass,
        f"replay={spell(plan.replay)} is not decided on the device": gate is None
        and not isinstance(plan.replay, NeuronReplay | None),
        f"passes={spell(plan.passes)} drafts what the engine cannot check": not isinstance(
            plan.passes, AllPasses
        )
        and not drafted,
        f"store={spell(plan.store)} keeps codes": bool(session.memory.layers[0].scales),
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
        layers = (shape.layers,)
        self.limits = torch.zeros(*layers, **fine)
        self.skip = torch.zeros(*layers, rows, dtype=torch.int32, device=session.device)
        self.counts = torch.zeros(*layers, 2, dtype=torch.int32, device=session.device)
        self.luck = torch.zeros(*layers, places, rows, **fine)
        self.ages = torch.zeros(rows, places, dtype=torch.int32, device=session.device)
        self.fade = torch.zeros(rows, **fine)
        # stock torch on a GPU computes all, and masks
        self.skips = session.device.type == "cpu" or has_decode_kernel(self.x)
        self.gates: list[GateState] = []  # of the layers
        self.memory: list[Tensor] = []  # the layers' tensors that steps read and write
        # a step that computes whole MLPs, and one that computes their slices
        self.programs: dict[bool, TokenStep] = {}
        self.replayed = False  # whether the last frame was made by what was recorded alone
        self.drawn = rows * places  # rows of tokens whose codes a frame draws

    def frame(self, noise: Tensor, action: int | Tensor | None = None) -> Tensor:
        """The next frame's codes [V, N, D], from noise [V, N, D, K]; the caller commits it."""
        session, shape = self.session, self.session.shape
        pos = shape.positions(session.memory.latent_frame, 1, session.device)
        past = session.memory.past
        ready = session.memory.replay.ready.issuperset((0,))
        session.begin(pos=pos, step=0, steps=1, noise=(0.0,))
        self.meet_memory()
        cos, sin = session.memory.cos_sin(pos)
        self.cos.copy_(cos[:, 0])
        self.sin.copy_(sin[:, 0])
        self.noise.copy_(noise)
        self.hidden.copy_(session.memory.features.last_state())
        self.take_action(action)
        self.place.fill_(0)
        self.slot.fill_(past)
        self.counts.zero_()
        if self.gates:
            self.ready.fill_(ready)
            self.set_limits()
            if self.gates[0].gate.score == "drawn" and ready:
                self.draw_luck()
        whole = self.whole_places(ready)
        self.replayed = self.graph and self.programs.keys() >= set(whole)
        for one in whole:
            if one not in self.programs:
                self.programs[one] = TokenStep(self, one)
            self.programs[one].replay()
        self.learn_errors(whole)
        for layer in session.memory.layers:
            layer.pos[:, :, past : past + shape.tokens_per_frame] = pos
        session.memory.features.hidden = self.hidden.clone()
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
        rng = self.session.memory.policy_rng
        drawn = torch.rand(size, generator=rng, dtype=torch.float32, device=self.luck.device)
        self.luck.copy_(drawn.transpose(0, 1))

    def _slices(self) -> NeuronReplay | None:
        """Make slices of the MLPs, where the plan's policy computes those."""
        policy, calibration = self.session.plan.replay, self.session.spec.calibration
        if not isinstance(policy, NeuronReplay) or not policy.share:
            return None
        assert calibration is not None  # a prompt's pass has loaded it
        mlps = [layer.mlp for layer in self.trunk.weights]
        cuts = [
            calibration.cut(policy.share, i, mlp.down.dense(self.session.dtype))
            for i, mlp in enumerate(mlps)
        ]
        self.trunk.add_slices(list(map(slice_mlp, mlps, cuts)))
        self.betas = [cut.beta for cut in cuts]
        return policy

    def whole_places(self, ready: bool) -> list[bool]:
        """For each of the frame's tokens, whether its MLPs run whole; else in part or by a gate."""
        session, policy = self.session, self.neurons
        places = session.shape.tokens_per_frame
        if policy is None or (policy.remembers and not ready):
            return [True] * places
        return [policy.computes_all(session.memory.chunk, place) for place in range(places)]

    def learn_errors(self, whole: list[bool]) -> None:
        """Where whole outputs were left, leave what the slices are off by."""
        if self.neurons is None or not self.neurons.remembers or not any(whole):
            return
        index = torch.tensor([place for place, one in enumerate(whole) if one])
        if self.session.device.type == "cuda":
            # from pinned memory, so that the host does not wait
            index = index.pin_memory().to(self.session.device, non_blocking=True)
        for layer, part in zip(self.session.memory.layers, self.trunk.slices, strict=True):
            error, base = (layer.own["replay"][name][0] for name in ("error", "input"))
            about = run_mlp(base.index_select(1, index), part)
            error.index_copy_(1, index, error.index_select(1, index) - about)

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

    def meet_memory(self) -> None:
        """Point the steps to the session's memory, where that is not the last frame's."""
        session = self.session
        held = [x for layer in session.memory.layers for x in (layer.k, layer.v, layer.log_count)]
        same = len(held) == len(self.memory)
        if same and all(a is b for a, b in zip(held, self.memory, strict=True)):
            return
        self.memory, self.programs = held, {}
        shape, rules = session.shape, self.rules()
        rotation = Rotation(self.cos, self.sin, session.rope.interleaved)
        window = self._window()
        merged = session.plan.cache.merges or any(session.memory.left_padding)
        self.steps: list[Step] = []
        self.kept: list[Kept | None] = []
        self.errors: list[Error | None] = []
        self.gates = [self._gate(i, rule) for i, rule in enumerate(rules)]
        self.input_gates = [x for x in self.gates if x.gate.score == "input"]
        self.limits_set: list[float] = []
        for i, layer in enumerate(session.memory.layers):
            gate, kept, error = None, None, None
            if self.gates:
                gate, kept = self.gates[i], self._kept(i)
            if self.neurons is not None and self.neurons.remembers:
                kept, error = self._memory(i)
            log_count = layer.log_count if merged else None
            entries = Entries(layer.k, layer.v, self.slot, log_count, layer.unrotated)
            attends = gate is not None and gate.gate.score != "input"
            step = Step(
                entries, shape.heads, self.place, rotation, window, gate if attends else None
            )
            self.steps.append(step)
            self.kept.append(kept)
            self.errors.append(error)

    def _window(self) -> Window | None:
        policy, session = self.session.plan.attention, self.session
        if not isinstance(policy, WindowAttention):
            return None
        pads = session.memory.left_padding or (0,) * session.shape.batch
        padding = torch.tensor(pads, dtype=torch.int32, device=session.device)
        return Window(policy.sink, policy.tokens, policy.sink + max(pads) + policy.tokens, padding)

    def rules(self) -> list[TokenGate]:
        """How the next frame's tokens are chosen, by layer; none where they are not."""
        shape, runner = self.session.shape, self.session.memory.replay
        if not isinstance(runner, ReplayRunner) or runner.policy is None:
            return []
        chunk = self.session.memory.chunk
        return [runner.policy_of(i).token_gate(shape, chunk) for i in range(shape.layers)]

    def set_limits(self) -> None:
        """Those of the next frame: what a policy says that takes turns, else what they were."""
        limits = [rule.limit for rule in self.rules()]
        if limits == self.limits_set:
            return
        if len(set(limits)) == 1:
            self.limits.fill_(limits[0])
        else:
            self.limits.copy_(torch.tensor(limits))
        self.limits_set = limits

    def _gate(self, layer: int, rule: TokenGate) -> GateState:
        return GateState.of(
            rule, self.session.memory.layers[layer].own["replay"], limit=self.limits[layer],
            place=self.place, ready=self.ready, skip=self.skip[layer], counts=self.counts[layer],
            luck=self.luck[layer] if rule.rule == "draw" else None,
        )  # fmt: skip

    def _kept(self, layer: int) -> Kept:
        """What a layer's MLP keeps, and replays where a gate says so."""
        own = self.session.memory.layers[layer].own["replay"]
        drift = own["drift"][0, :, 0] if "drift" in own else None
        output, age = own["output"][0], own["age"][0]
        return Kept(self.skip[layer], self.place, output, age, drift, self.ready, DRIFT_ROWS)

    def _memory(self, layer: int) -> tuple[Kept, Error]:
        """What a token that is computed whole leaves, and how one that is not reads it."""
        own = self.session.memory.layers[layer].own["replay"]
        error, base = own["error"][0], own["input"][0]
        # nothing is skipped, and nobody reads the ages
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
        places, work = shape.tokens_per_frame, session.work
        self.count_entries([past + i + 1 for i in range(places)])
        total = shape.batch * places * shape.layers
        skipped: Tensor | float = 0.0
        if self.gates:
            if ready:
                work.rows_eligible += total
            skipped, masked = self.counts.sum(0, dtype=torch.float64)
            # beside a row that is computed the weights are read all the same
            if not self.skips:
                skipped, masked = 0.0, skipped + masked
            work.simulated_rows_replayed += masked
        self.count_mlps(total, total * whole.count(False) / places, ready, skipped)

    def count_entries(self, ends: list[int]) -> None:
        """Count the attention of tokens by the entries that each reads, its own included."""
        session, shape = self.session, self.session.shape
        policy = session.plan.attention
        if isinstance(policy, WindowAttention):
            reach = policy.sink + max(session.memory.left_padding, default=0) + policy.tokens
            ends = [end if end <= reach else policy.sink + policy.tokens for end in ends]
        queries = shape.batch * shape.heads * shape.layers
        session.work.add_pairs(queries * sum(ends), shape.head_dim)

    def count_mlps(
        self, total: int, sliced: float, ready: bool, skipped: Tensor | float = 0.0
    ) -> None:
        """Count the MLPs of `total` rows, of which some were slices and some were skipped."""
        mlp, counted = self.trunk.weights[0].mlp, self.session.work
        macs = sum(part.rows * part.columns for part in mlp.parts)
        if self.neurons is not None:
            part, memory = self.trunk.slices[0], self.neurons.remembers
            work = self.slice_work()
            computed = (part.up.rows - part.linear) / mlp.up.rows  # of a sliced MLP's neurons
            skipped = sliced * (1 - computed)
            # maps, and slices of what was computed whole: errors are learned from them
            more = sliced * (work - computed * macs) + (total - sliced) * work * memory
            counted.rows_eligible += total * (ready or not memory)
            counted.add_mlp_macs(more)
        counted.add_mlps(macs, total - skipped, total)
