"""The engine: gate, replay cache, scheduler and cores, around one weight matrix and a batch."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from amaranth.hdl import Array, Cat, Const, Module, Signal, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from numpy.typing import ArrayLike

from tachyscope.errors import TachyscopeError
from tachyscope.fpga import cycle_model
from tachyscope.fpga.core import Core
from tachyscope.fpga.drs import RowScheduler
from tachyscope.fpga.fixed import ACC_BITS, Ints, check_range, index
from tachyscope.fpga.gemv import GemvArray
from tachyscope.fpga.replay_cache import ReplayCache
from tachyscope.fpga.tas_gate import TasGate


class Phase(enum.IntEnum):
    """What the engine does in a cycle; each has a counter."""

    SCORE = 0  # verdicts and activations of the rows are coming in
    RUN = 1  # jobs run, replays are read
    DRAIN = 2  # the last results leave
    SEAL = 3  # what was computed becomes valid in the cache


@dataclass(frozen=True)
class Engine:
    """A step for `rows` rows: each is scored, then computed by a core or replayed from the cache.

    Parameters
    ----------
    array, depth, outputs : the cores' array, and the matrix [outputs, depth]
    gate : the TAS gate
    rows, cores, deal : the batch, the cores, and how rows are dealt (``drs.RowScheduler``)
    positions : places of a frame: the cache has rows * positions entries
    """

    array: GemvArray = field(default_factory=GemvArray)
    depth: int = 64
    outputs: int = 64
    gate: TasGate = field(default_factory=lambda: TasGate(heads=4, head_dim=16))
    rows: int = 1
    cores: int = 1
    deal: str = "tiles"
    positions: int = 256

    def __post_init__(self) -> None:
        check_range("Engine positions", self.positions, 1, 2**16)
        _ = self.scheduler, self.core, self.cache

    @property
    def scheduler(self) -> RowScheduler:
        return RowScheduler(self.rows, self.cores, self.array.tiles(self.outputs), self.deal)

    @property
    def core(self) -> Core:
        return Core(self.array, self.depth, self.outputs, self.rows, self.scheduler.tiles_per_job)

    @property
    def cache(self) -> ReplayCache:
        return ReplayCache(self.rows * self.positions, self.core.tiles, self.array.lanes, self.rows)

    def compute(
        self,
        weights: ArrayLike,
        multiplier: ArrayLike,
        shift: ArrayLike,
        steps: Sequence[Sequence[Token]],
    ) -> tuple[list[list[bool]], list[list[Ints]]]:
        """Whether each token of each step replays, and its output."""
        held: dict[tuple[int, int], Ints] = {}
        replays, outputs = [], []
        for step in steps:
            if len(step) != self.rows:
                raise TachyscopeError(f"a step must have {self.rows} tokens, got {len(step)}")
            flags, ys = [], []
            for row, token in enumerate(step):
                check_range("position", token.position, 0, self.positions - 1)
                place = (row, token.position)
                near = self.gate.compute(token.q, token.q_rotated, token.k, token.threshold)
                flags.append(near and place in held)
                if not flags[-1]:
                    held[place] = self.core.compute(weights, token.x, multiplier, shift)
                ys.append(held[place])
            replays.append(flags)
            outputs.append(ys)
        return replays, outputs

    def cycles(self, replays: Sequence[Sequence[bool]]) -> int:
        """From the first score to the last result of the steps, when nothing stalls."""
        run = cycle_model.run(self, replays)
        return run.cycles["o"][-1] - run.cycles["score"][0] + 1

    def command_layout(self) -> data.StructLayout:
        return data.StructLayout({"position": index(self.positions), "threshold": signed(ACC_BITS)})

    def create(self) -> EngineUnit:
        return EngineUnit(self)


@dataclass(frozen=True)
class Token:
    """What one row brings to a step."""

    position: int
    threshold: int
    q: Ints
    q_rotated: Ints
    k: Ints
    x: Ints

    @classmethod
    def draw(cls, rng: np.random.Generator, engine: Engine, position: int, share: float) -> Token:
        """A random token that replays with about the given probability."""
        q, rotated, k = (rng.integers(-128, 128, engine.gate.dim) for _ in range(3))
        score = int((q if engine.gate.query == "before_rope" else rotated) @ k)
        threshold = score - 1 if rng.random() < share else score + int(rng.integers(0, 2))
        return cls(position, threshold, q, rotated, k, rng.integers(-128, 128, engine.depth))


class EngineUnit(wiring.Component):
    """Steps one after the other; how long each phase takes is in ``cycle_model.py``.

    Members
    -------
    command : In(stream of {position, threshold})
        One beat a row, rows in order.
    score : In(stream of the gate's {q, q_rotated, k})
        The gate's beats of every row, in order.
    x : In(stream of macs signed(8))
        The activations of every row, in order; those of a row that replays are not used.
    weights, scale : Array(In(stream)), one of each a core
        As the core takes them, in the order that `dealt` tells.
    dealt : Out(stream of {core, row, tile})
    clear : In(stream of 1 bit)
        Empties the cache, between steps: another video begins.
    o : Out(stream of {row, tile, y, replayed})
        `tiles` beats for every row, in the order they are ready.
    phase : Out(Phase)
        For counters.
    """

    def __init__(self, params: Engine) -> None:
        self.params = params
        core = params.core
        array = params.array
        vector = data.ArrayLayout(signed(8), array.macs)
        gate = data.ArrayLayout(signed(8), params.gate.macs)
        score = data.StructLayout({"q": gate, "q_rotated": gate, "k": gate})
        dealt = data.StructLayout(
            {"core": index(params.cores), "row": index(params.rows), "tile": index(core.tiles)}
        )
        self.result = data.StructLayout(
            {
                "row": index(params.rows),
                "tile": index(core.tiles),
                "y": data.ArrayLayout(signed(8), array.lanes),
                "replayed": 1,
            }
        )
        super().__init__(
            {
                "command": In(stream.Signature(params.command_layout())),
                "score": In(stream.Signature(score)),
                "x": In(stream.Signature(vector)),
                "weights": In(stream.Signature(data.ArrayLayout(vector, array.lanes))).array(
                    params.cores
                ),
                "scale": In(stream.Signature(core.requant.scale_layout())).array(params.cores),
                "clear": In(stream.Signature(1)),
                "dealt": Out(stream.Signature(dealt)),
                "o": Out(stream.Signature(self.result)),
                "phase": Out(Phase),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        engine = self.params
        core_params = engine.core
        rows, beats, tiles = engine.rows, core_params.beats, core_params.tiles
        m.submodules.gate = gate = engine.gate.create()
        m.submodules.cache = cache = engine.cache.create()
        m.submodules.drs = drs = engine.scheduler.create()
        cores = [core_params.create() for _ in range(engine.cores)]
        for number, core in enumerate(cores):
            m.submodules[f"core{number}"] = core

        phase = Signal(Phase)
        scoring = phase == Phase.SCORE
        m.d.comb += self.phase.eq(phase)

        # activations: into every core
        x_row, x_beat, x_done = Signal(index(rows)), Signal(index(beats)), Signal()
        m.d.comb += self.x.ready.eq(scoring & ~x_done)
        for core in cores:
            m.d.comb += [
                core.x.valid.eq(self.x.valid & self.x.ready),
                core.x.p.eq(Cat(x_row, x_beat, self.x.payload.as_value())),
            ]
        with m.If(self.x.valid & self.x.ready):
            m.d.sync += x_beat.eq(x_beat + 1)
            with m.If(x_beat == beats - 1):
                m.d.sync += [x_beat.eq(0), x_row.eq(x_row + 1)]
                with m.If(x_row == rows - 1):
                    m.d.sync += [x_row.eq(0), x_done.eq(1)]

        # verdicts: the gate's, where the cache has something to replay; the last waits for x
        row = Signal(index(rows))
        asked, scored = Signal(), Signal()
        entries = Array(Signal(index(engine.cache.entries), name=f"entry{r}") for r in range(rows))
        entry = row * engine.positions + self.command.p.position
        between = scoring & (row == 0) & ~asked
        verdict = scoring & gate.o.valid & cache.hit.valid & (x_done | (row != rows - 1))
        left = Signal(index(engine.gate.beats * rows))
        m.d.comb += [
            gate.i.valid.eq(self.score.valid & scoring & ~scored),
            self.score.ready.eq(gate.i.ready & scoring & ~scored),
            gate.i.p.eq(self.score.p),
            gate.threshold.valid.eq(self.command.valid & scoring),
            gate.threshold.payload.eq(self.command.p.threshold),
            cache.clear.valid.eq(self.clear.valid & between),
            self.clear.ready.eq(cache.clear.ready & between),
            cache.ask.valid.eq(self.command.valid & scoring & ~asked & ~cache.clear.valid),
            cache.ask.payload.eq(entry),
            drs.verdict.valid.eq(verdict),
            drs.verdict.p.row.eq(row),
            drs.verdict.p.replay.eq(gate.o.payload & cache.hit.payload),
            gate.o.ready.eq(verdict & drs.verdict.ready),
            cache.hit.ready.eq(verdict & drs.verdict.ready),
            self.command.ready.eq(verdict & drs.verdict.ready),
        ]
        with m.If(gate.i.valid & gate.i.ready):
            m.d.sync += left.eq(left + 1)
            with m.If(left == engine.gate.beats * rows - 1):
                m.d.sync += [left.eq(0), scored.eq(1)]
        with m.If(cache.ask.valid & cache.ask.ready):
            m.d.sync += [asked.eq(1), entries[row].eq(entry)]
        with m.If(self.command.valid & self.command.ready):
            m.d.sync += [asked.eq(0), row.eq(row + 1)]
            with m.If(row == rows - 1):
                m.d.sync += row.eq(0)

        # jobs and replays
        m.d.comb += [
            cache.read.valid.eq(drs.replays.valid),
            cache.read.p.entry.eq(entries[drs.replays.payload]),
            cache.read.p.tag.eq(drs.replays.payload),
            drs.replays.ready.eq(cache.read.ready),
        ]
        wiring.connect(m, wiring.flipped(self.dealt), drs.dealt)
        for number, core in enumerate(cores):
            wiring.connect(m, drs.jobs[number], core.job)
            wiring.connect(m, wiring.flipped(self.weights[number]), core.weights)
            wiring.connect(m, wiring.flipped(self.scale[number]), core.scale)

        # results: the lowest core that has one, then replays; computed ones also to the cache
        out = Signal(self.result)
        shown, made = Signal(), Signal(range(rows * tiles + 1))
        accept = (~shown | self.o.ready) & cache.write.ready & (phase != Phase.SEAL)
        m.d.comb += [self.o.valid.eq(shown), self.o.p.eq(out)]
        with m.If(self.o.ready):
            m.d.sync += shown.eq(0)
        blocked = Signal(len(cores) + 1)
        for number, core in enumerate(cores):
            m.d.comb += [
                core.o.ready.eq(accept & ~blocked[number]),
                blocked[number + 1].eq(blocked[number] | core.o.valid),
            ]
            with m.If(core.o.valid & core.o.ready):
                m.d.comb += [
                    cache.write.valid.eq(1),
                    cache.write.p.entry.eq(entries[core.o.p.row]),
                    cache.write.p.tile.eq(core.o.p.tile),
                    cache.write.p.y.eq(core.o.p.y),
                ]
                m.d.sync += [
                    shown.eq(1),
                    made.eq(made + 1),
                    out.eq(Cat(core.o.p.as_value(), Const(0, 1))),
                ]
        m.d.comb += cache.o.ready.eq(accept & ~blocked[-1])
        with m.If(cache.o.valid & cache.o.ready):
            m.d.sync += [
                shown.eq(1),
                made.eq(made + 1),
                out.row.eq(cache.o.p.tag),
                out.tile.eq(cache.o.p.tile),
                out.y.eq(cache.o.p.y),
                out.replayed.eq(1),
            ]

        sealing = Signal(index(rows))
        m.d.comb += [
            cache.seal.valid.eq((phase == Phase.SEAL) & drs.index.bit_select(sealing, 1)),
            cache.seal.payload.eq(entries[sealing]),
        ]
        with m.Switch(phase):
            with m.Case(Phase.SCORE):
                with m.If(drs.verdict.valid & drs.verdict.ready & (row == rows - 1)):
                    m.d.sync += [phase.eq(Phase.RUN), x_done.eq(0), scored.eq(0)]
            with m.Case(Phase.RUN):
                with m.If(drs.verdict.ready):
                    m.d.sync += phase.eq(Phase.DRAIN)
            with m.Case(Phase.DRAIN):
                with m.If((made == rows * tiles) & (~shown | self.o.ready)):
                    m.d.sync += [phase.eq(Phase.SEAL), made.eq(0)]
            with m.Case(Phase.SEAL):
                m.d.sync += sealing.eq(sealing + 1)
                with m.If(sealing == rows - 1):
                    m.d.sync += [sealing.eq(0), phase.eq(Phase.SCORE)]
        return m
