"""Frames by drafts: passes over several tokens, each recorded once and then repeated.

On a GPU all passes have one size: where fewer tokens are left in the frame, a pass begins earlier,
and computes some entries again, to the same values. So one CUDA graph of the trunk and one of the
codes serve all passes; between two of them the host reads one number, how many drafts were right.
On a CPU a pass is a native program for its number of tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.session import Session
from tachyscope.decode.engine import DecodeEngine
from tachyscope.decode.parts import DecodeParts
from tachyscope.decode.program import DepthPass, TrunkPass
from tachyscope.passes.draft import Draft


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
        self.trunks: dict[tuple[int, bool], TrunkPass] = {}
        self.depths: dict[int, DepthPass] = {}
        self.memory: list[Tensor] = []
        self.codes = torch.zeros_like(self.engine.codes)  # this frame's, drafts behind the others
        self.replayed = False  # whether the last frame was made by recorded passes alone
        self.ready = False  # whether the last frame left errors to a policy that remembers them
        self.whole = True  # whether this frame's MLPs are computed whole
        self.drawn = self.passes = 0  # rows whose codes the last frame drew, and its trunk passes

    def frame(self, noise: Tensor, action: int | Tensor | None = None) -> Tensor:
        """The next frame's codes [V, N, D], from noise [V, N, D, K]; the caller commits it."""
        engine, session = self.engine, self.session
        pos = session.shape.positions(session.memory.latent_frame, 1, session.device)
        cos, sin = session.memory.cos_sin(pos)
        engine.cos.copy_(cos[:, 0])
        engine.sin.copy_(sin[:, 0])
        engine.take_action(action)
        past, self.drawn, self.passes, self.replayed = session.memory.past, 0, 0, True
        self.pos, self.ready = pos, session.memory.replay.ready.issuperset((0,))
        whole = engine.whole_places(self.ready)
        self.whole = whole[0]
        codes = session.plan.passes.sample_frame(session, session.memory.features, self, noise)
        assert codes is not None
        engine.learn_errors(whole)
        for layer in session.memory.layers:
            layer.pos[:, :, past : past + len(pos)] = pos
        return codes

    def _size(self, tokens: int) -> int:
        """The size of a pass for `tokens` tokens: on a GPU one of two, so that two are recorded."""
        return tokens if self.native or tokens == 1 else self.size

    def feed(self, codes: Tensor, at: int) -> Tensor:
        engine, session, pos = self.engine, self.session, self.pos
        tokens, start = codes.shape[1], session.memory.past + session.memory.now
        session.begin(pos=pos[at : at + tokens], step=0, steps=1, noise=(0.0,), drafted=True)
        engine.meet_memory()
        if engine.memory is not self.memory:
            self.memory, self.trunks = engine.memory, {}
        self.codes[:, at : at + tokens] = codes
        size = self._size(tokens)
        before = size - tokens  # places that are computed again
        run = self._trunk(size)
        run.take(self.codes[:, at - before : at + tokens])
        engine.place.fill_(at - before)
        engine.slot.fill_(start - before)
        run.replay()
        self.passes += 1
        self._count(size, before, start - before)
        states: Tensor = run.states.unflatten(0, (-1, size))[:, before:].clone()
        session.memory.features.hidden = states[:, -1]
        return states

    def _trunk(self, size: int) -> TrunkPass:
        if (size, self.whole) not in self.trunks:
            self.replayed = False
            self.trunks[size, self.whole] = TrunkPass(self.engine, size, self.whole)
        return self.trunks[size, self.whole]

    def draw(self, states: Tensor, noise: Tensor, logits: Tensor | None = None) -> Tensor:
        assert logits is None  # `unsupported` refuses plans that want them
        tokens = states.shape[1]
        size = self._size(tokens)
        if size not in self.depths:
            self.replayed = False
            self.depths[size] = DepthPass(self.engine, self.parts.depth, size)
        run = self.depths[size]
        # the places behind these are not read
        run.hidden.unflatten(0, (-1, size))[:, :tokens] = states
        run.noise.unflatten(0, (-1, size))[:, :tokens, 0] = noise
        run.replay()
        self.drawn += len(run.hidden)
        codes: Tensor = run.codes.unflatten(0, (-1, size))[:, :tokens, 0].clone()
        return codes

    def pick(self, logits: Tensor, noise: Tensor) -> Tensor:
        raise TachyscopeError(
            "the decode engine keeps no logits to draft from: use passes=draft:source=codes"
        )

    def _count(self, tokens: int, again: int, start: int) -> None:
        """What a pass counts, as if it had been run layer by layer; `again` are no new tokens."""
        session, engine, shape = self.session, self.engine, self.session.shape
        session.work.macs += shape.batch * again * shape.macs
        end = start + tokens
        window = engine.steps[0].window
        if window is None:
            engine.count_entries([end] * tokens)  # all entries of a pass are scored, then masked
        else:
            reach = window.sink + min(session.memory.left_padding, default=0) + window.near
            ends = [start + i + 1 for i in range(tokens)]
            engine.count_entries(ends if end > reach else [end] * tokens)
        rows = shape.batch * tokens * shape.layers
        engine.count_mlps(rows, 0.0 if self.whole else rows, self.ready)
