"""Work on memory that stays where it is: a token's step, and passes over several tokens.

A program is launches that run one by one, one CUDA graph of them, or a CPU's native operations.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tachyscope.decode.cpu import Operations
from tachyscope.decode.depth import Depth
from tachyscope.decode.launches import Launches
from tachyscope.decode.layer import Layers
from tachyscope.decode.parts import DepthParts
from tachyscope.kernels.decode_attention import Scratch
from tachyscope.kernels.launch import record

if TYPE_CHECKING:
    from tachyscope.decode.engine import DecodeEngine


class Program(abc.ABC):
    """Operations that run many times on the same memory, an engine's and its own."""

    def __init__(self, engine: DecodeEngine) -> None:
        self.engine, self.native = engine, engine.graph and engine.x.device.type == "cpu"
        self._repeat: Callable[[], object] | None = None

    def replay(self) -> None:
        """Run it once; the first run also records it, and on a GPU compiles its kernels."""
        if self._repeat is not None:
            self._repeat()
        elif self.native:
            operations = Operations()
            self.run(operations)
            self._repeat = operations.finish()
            self._repeat()
        else:
            self.launch()
            if self.engine.graph:
                self._repeat = record(self.launch).replay

    def launch(self) -> None:
        """Run it by launching kernels."""
        self.run(Launches())

    @abc.abstractmethod
    def run(self, to: Launches | Operations) -> None:
        """Its operations in order: launched at once, or listed for a CPU's native program."""


class TokenStep(Program):
    """One token: its codes, then the trunk's state that predicts the next."""

    def __init__(self, engine: DecodeEngine, whole: bool = True) -> None:
        super().__init__(engine)
        self.whole = whole

    def run(self, to: Launches | Operations) -> None:
        engine, whole = self.engine, self.whole
        engine.depth.step(to, engine.codes, engine.noise, engine.place)
        first, second = engine.projector
        to.gemv(engine.projected, engine.depth.total, (first,), gelu=True)
        to.gemv(engine.x, engine.projected, (second,))
        if engine.actions is not None:
            to.add(engine.x, engine.action)
        to.clear(engine.barriers)
        kept = engine.kept if whole else engine.errors
        engine.trunk.step(to, engine.steps, kept, engine.barriers, not whole, engine.input_gates)
        to.norm(engine.hidden, engine.x, engine.norm)
        to.raise_numbers(engine.numbers)


class TrunkPass(Program):
    """The trunk over `tokens` tokens of an engine's session, from its place and slot on.

    `take` hands in their codes; `states` are what it leaves.
    """

    def __init__(self, engine: DecodeEngine, tokens: int, whole: bool) -> None:
        super().__init__(engine)
        self.whole, rows, shape = whole, len(engine.x), engine.session.shape
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

    def take(self, codes: Tensor) -> None:
        self.codes.copy_(codes)
        if self.native:
            self._embed()

    def _embed(self) -> None:
        self.x.copy_(self.engine.embed(self.codes))

    def run(self, to: Launches | Operations) -> None:
        engine = self.engine
        if not self.native:
            self._embed()
        to.clear(self.barriers)
        kept = engine.kept if self.whole else engine.errors
        self.layers.step(to, engine.steps, kept, self.barriers, sliced=not self.whole)
        to.norm(self.states, self.x, engine.norm)


class DepthPass(Program):
    """Codes of `tokens` places at once, each drawn as if it came alone."""

    def __init__(self, engine: DecodeEngine, parts: DepthParts, tokens: int) -> None:
        super().__init__(engine)
        rows, (videos, _, depths, count) = len(engine.x), engine.noise.shape
        self.hidden = engine.x.new_zeros(rows * tokens, engine.x.shape[1])
        self.codes = engine.codes.new_zeros(videos * tokens, 1, depths)
        self.noise = engine.noise.new_ones(videos * tokens, 1, depths, count)
        self.place = torch.zeros((), dtype=torch.int32, device=engine.x.device)
        self.depth = Depth(parts, engine.depth.draw, self.hidden)

    def run(self, to: Launches | Operations) -> None:
        self.depth.step(to, self.codes, self.noise, self.place)
