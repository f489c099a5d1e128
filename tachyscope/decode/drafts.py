"""Frames by drafts: passes over several tokens, each recorded once and then repeated.

On a GPU a pass has one size: where fewer tokens are left in the frame than a pass has, it begins
earlier, and what it runs over anew stays what it was. So one CUDA graph of the trunk and one of
the codes serve all passes; between two of them the host reads one number, how many drafts were
right. On a CPU a pass is a native program for its number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from tachyscope.decode.cpu import DepthPass, TrunkPass
from tachyscope.decode.depth import Depth
from tachyscope.decode.engine import DecodeEngine
from tachyscope.decode.layer import Layers
from tachyscope.decode.parts import DecodeParts, DepthParts
from tachyscope.kernels.decode_attention import Scratch
from tachyscope.kernels.launch import record
from tachyscope.passes.draft import Draft
from tachyscope.session import Session
from tachyscope.types import TokenFrame


class DraftEngine:
    """Makes frames of a session whose plan drafts; places, slots and memory are an engine's."""

    def __init__(self, parts: DecodeParts, session: Session, graph: bool = True) -> None:
        self.parts, self.session, self.graph = parts, session, graph
        self.native = graph and session.device.type == "cpu"
        self.engine = DecodeEngine(parts, session, graph)
        policy = session.plan.passes
        assert isinstance(policy, Draft)
        self.size = min(1 + policy.places, session.shape.tokens_per_frame)  # tokens of a pass
        # by the number of tokens, and whether MLPs are whole
        self.trunks: dict[tuple[int, bool], TrunkPass | TrunkLaunches] = {}
        self.depths: dict[int, DepthPass | DepthLaunches] = {}
        self.memory: list[Tensor] = []
        self.codes = torch.zeros_like(self.engine.codes)  # this frame's, drafts behind the others
        self.replayed = False  # whether the last frame was made by recorded passes alone
        self.drawn = self.passes = 0  # rows whose codes the last frame drew, and its trunk passes

    def frame(self, noise: Tensor, action: int | Tensor | None = None) -> Tensor:
        """The next frame's codes [V, N, D], from noise [V, N, D, K]; the caller commits it."""
        engine, session = self.engine, self.session
        pos = session.shape.positions(session.latent_frame, 1, session.device)
        cos, sin = session.rotation(pos)
        engine.cos.copy_(cos[:, 0])
        engine.sin.copy_(sin[:, 0])
        engine.take_action(action)
        past, self.drawn, self.passes, self.replayed = session.past, 0, 0, True
        ready = session.replay.ready.issuperset((0,))
        whole = engine.whole_places(ready)

        def feed(codes: Tensor, at: int) -> Tensor:
            return self._feed(codes, at, pos, ready, whole[0])

        def draw(states: Tensor, at: int) -> tuple[Tensor, Tensor]:
            return self._draw(states, noise[:, at : at + states.shape[1]])

        # no draft of logits comes here: what picks codes of them is not asked for
        frame = TokenFrame(noise, torch.add, feed, draw)
        codes = session.plan.passes.sample_frame(session, frame)
        assert codes is not None
        engine.learn_errors(whole)
        for layer in session.layers:
            layer.pos[:, :, past : past + len(pos)] = pos
        return codes

    def _size(self, tokens: int) -> int:
        """Of the pass that runs so many tokens: on a GPU one of two, so that two are recorded."""
        return tokens if self.native or tokens == 1 else self.size

    def _feed(self, codes: Tensor, at: int, pos: Tensor, ready: bool, whole: bool) -> Tensor:
        engine, session = self.engine, self.session
        tokens, start = codes.shape[1], session.past + session.now
        session.begin(pos=pos[at : at + tokens], step=0, steps=1, noise=(0.0,), drafted=True)
        engine.meet_memory()
        if engine.memory is not self.memory:
            self.memory, self.trunks = engine.memory, {}
        self.codes[:, at : at + tokens] = codes
        size = self._size(tokens)
        before = size - tokens  # places that are run over anew
        run = self._trunk(size, whole)
        run.take(self.codes[:, at - before : at + tokens])
        engine.place.fill_(at - before)
        engine.slot.fill_(start - before)
        run.replay()
        self.passes += 1
        self._count(size, before, start - before, ready, whole)
        states: Tensor = run.states.unflatten(0, (-1, size))[:, before:].clone()
        session.features["hidden"] = states[:, -1]
        return states

    def _trunk(self, size: int, whole: bool) -> TrunkPass | TrunkLaunches:
        if (size, whole) not in self.trunks:
            self.replayed = False
            self.trunks[size, whole] = (
                TrunkPass(self.engine, size)
                if self.native
                else TrunkLaunches(self.engine, size, whole, self.graph)
            )
        return self.trunks[size, whole]

    def _draw(self, states: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        tokens = states.shape[1]
        size = self._size(tokens)
        if size not in self.depths:
            self.replayed = False
            self.depths[size] = (
                DepthPass(self.engine, self.parts.depth, size)
                if self.native
                else DepthLaunches(self.engine, self.parts.depth, size, self.graph)
            )
        run = self.depths[size]
        # behind these places are others that nobody asks for
        run.hidden.unflatten(0, (-1, size))[:, :tokens] = states
        run.noise.unflatten(0, (-1, size))[:, :tokens, 0] = noise
        run.replay()
        self.drawn += len(run.hidden)
        codes = run.codes.unflatten(0, (-1, size))[:, :tokens, 0]
        return codes.clone(), noise[..., :0]

    def _count(self, tokens: int, again: int, start: int, ready: bool, whole: bool) -> None:
        """What a pass counts, as if it had been run layer by layer; `again` are no new tokens."""
        session, engine, shape = self.session, self.engine, self.session.shape
        session.meter.add("macs", shape.batch * again * shape.macs)
        end = start + tokens
        if engine.steps[0].window is None:
            engine.count_entries([end] * tokens)  # all entries of a pass are scored, then masked
        else:
            reach = engine.steps[0].window.whole
            ends = [start + i + 1 for i in range(tokens)]
            engine.count_entries(ends if end > reach else [end] * tokens)
        rows = shape.batch * tokens * shape.layers
        engine.count_mlps(rows, 0.0 if whole else rows, ready)


class Launches:
    """Launches that are recorded as a CUDA graph when they first run, where that is wanted."""

    def __init__(self, work: Callable[[], None], graph: bool) -> None:
        self.work, self.graph = work, graph
        self.recorded: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self.recorded is not None:
            self.recorded.replay()
            return
        self.work()
        if self.graph:
            self.recorded = record(self.work)


class TrunkLaunches:
    """The trunk over `tokens` tokens of an engine's session, from its place and slot on."""

    def __init__(self, engine: DecodeEngine, tokens: int, whole: bool, graph: bool) -> None:
        self.engine, self.whole = engine, whole
        rows, shape = len(engine.x), engine.session.shape
        self.codes = engine.codes.new_zeros(engine.videos, tokens, engine.codes.shape[2])
        self.x = engine.x.new_empty(rows * tokens, engine.x.shape[1])
        self.states = torch.empty_like(self.x)
        scratch = Scratch(
            rows, shape.heads, shape.kv_heads, shape.head_dim, engine.x.device, tokens
        )
        self.layers = Layers(engine.trunk.weights, self.x, scratch, tokens)
        if engine.trunk.slices:
            self.layers.add_slices(engine.trunk.slices)
        self.barriers = self.layers.barriers()
        self.replay = Launches(self._run, graph)

    def take(self, codes: Tensor) -> None:
        self.codes.copy_(codes)

    def _run(self) -> None:
        engine = self.engine
        self.x.copy_(engine.embed(self.codes))
        self.barriers.zero_()
        kept = engine.kept if self.whole else engine.errors
        self.layers.step(engine.steps, kept, self.barriers, sliced=not self.whole)
        size = (self.x.shape[1],)
        self.states.copy_(F.rms_norm(self.x, size, engine.norm.weight, engine.norm.eps))


class DepthLaunches:
    """Codes of `tokens` places at once, each drawn as if it came alone."""

    def __init__(self, engine: DecodeEngine, parts: DepthParts, tokens: int, graph: bool) -> None:
        rows, (videos, _, depths, count) = len(engine.x), engine.noise.shape
        self.hidden = engine.x.new_zeros(rows * tokens, engine.x.shape[1])
        self.codes = engine.codes.new_zeros(videos * tokens, 1, depths)
        self.noise = engine.noise.new_ones(videos * tokens, 1, depths, count)
        self.place = torch.zeros((), dtype=torch.int32, device=engine.x.device)
        self.depth = Depth(parts, engine.depth.draw, self.hidden)
        self.replay = Launches(lambda: self.depth.step(self.codes, self.noise, self.place), graph)
