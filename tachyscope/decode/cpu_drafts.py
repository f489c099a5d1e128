"""Frames by drafts on a CPU: a pass over several tokens is a native program too."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tachyscope.attention.window import Window
from tachyscope.decode.cpu import DepthPass, TrunkPass
from tachyscope.decode.engine import DecodeEngine
from tachyscope.decode.parts import DecodeParts
from tachyscope.session import Session
from tachyscope.types import TokenFrame


class DraftEngine:
    """Makes frames of a session whose plan drafts; places, slots and memory are an engine's."""

    def __init__(self, parts: DecodeParts, session: Session) -> None:
        self.parts, self.session = parts, session
        self.engine = DecodeEngine(parts, session, graph=True)
        self.trunks: dict[int, TrunkPass] = {}  # by tokens of a pass
        self.depths: dict[int, DepthPass] = {}
        self.memory: list[Tensor] = []
        self.replayed = False
        self.drawn = 0  # rows of tokens whose codes the last frame drew

    def frame(self, noise: Tensor, action: int | Tensor | None = None) -> Tensor:
        """The next frame's codes [V, N, D], from noise [V, N, D, K]; the caller commits it."""
        engine, session = self.engine, self.session
        pos = session.shape.positions(session.latent_frame, 1, session.device)
        cos, sin = session.rotation(pos)
        engine.cos.copy_(cos[:, 0])
        engine.sin.copy_(sin[:, 0])
        moved = None if engine.actions is None else engine.actions[action].view(-1)
        past, self.drawn = session.past, 0

        def feed(codes: Tensor, at: int) -> Tensor:
            return self._feed(codes, at, pos, moved)

        def draw(states: Tensor, at: int) -> tuple[Tensor, Tensor]:
            return self._draw(states, noise[:, at : at + states.shape[1]])

        # no draft of logits comes here: what picks codes of them is not asked for
        frame = TokenFrame(noise, torch.add, feed, draw)
        codes = session.plan.passes.sample_frame(session, frame)
        assert codes is not None
        for layer in session.layers:
            layer.pos[:, :, past : past + len(pos)] = pos
        return codes

    def _feed(self, codes: Tensor, at: int, pos: Tensor, action: Tensor | None) -> Tensor:
        engine, session = self.engine, self.session
        tokens, start = codes.shape[1], session.past + session.now
        session.begin(pos=pos[at : at + tokens], step=0, steps=1, noise=(0.0,))
        engine.meet_memory()
        if engine.memory is not self.memory:
            self.memory, self.trunks = engine.memory, {}
        if tokens not in self.trunks:
            self.trunks[tokens] = TrunkPass(engine, tokens)
        run, x = self.trunks[tokens], self._embed(codes, action)
        run.memory.x.copy_(x.flatten(0, 1).repeat(session.shape.batch // len(x), 1))
        engine.place.fill_(at)
        engine.slot.fill_(start)
        run.replay()
        self._count(tokens, start)
        states: Tensor = run.memory.states.unflatten(0, (-1, tokens)).clone()
        session.features["hidden"] = states[:, -1]
        return states

    def _embed(self, codes: Tensor, action: Tensor | None) -> Tensor:
        """The trunk's inputs [V, S, W] of codes [V, S, D]."""
        total = torch.stack([book[codes[..., d]] for d, book in enumerate(self.parts.depth.books)])
        first, second = self.engine.projector
        x = F.gelu(F.linear(total.sum(0), first.dense(total.dtype), first.bias))
        x = F.linear(x, second.dense(total.dtype), second.bias)
        return x if action is None else x + action

    def _draw(self, states: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        tokens = states.shape[1]
        if tokens not in self.depths:
            self.depths[tokens] = DepthPass(self.engine, self.parts.depth, tokens)
        run = self.depths[tokens]
        run.hidden.copy_(states.flatten(0, 1))
        run.noise.copy_(noise.flatten(0, 1)[:, None])
        run.replay()
        self.drawn += len(run.hidden)
        return run.codes.view(*noise.shape[:3]).clone(), noise[..., :0]

    def _count(self, tokens: int, start: int) -> None:
        """What a pass counts, as if it had been run layer by layer."""
        session, meter = self.session, self.session.meter
        shape, policy, end = session.shape, session.plan.attention, start + tokens
        seen = tokens * end
        if isinstance(policy, Window):
            reach = policy.sink + max(session.left_padding, default=0) + policy.tokens
            if end > reach:
                each = (start + i + 1 for i in range(tokens))
                seen = sum(n if n <= reach else policy.sink + policy.tokens for n in each)
        pairs = shape.batch * shape.heads * shape.layers * seen
        meter.add("pairs", pairs)
        meter.add("macs", 2 * pairs * shape.head_dim)
        rows = shape.batch * tokens * shape.layers
        macs = sum(part.rows * part.columns for part in self.engine.trunk.weights[0].mlp.parts)
        meter.add("rows_computed", rows)
        meter.add("rows_replayed", 0.0)
        meter.add("macs", rows * macs)
        meter.add("mlp_macs", rows * macs)
