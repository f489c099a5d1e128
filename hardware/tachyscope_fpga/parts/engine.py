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

from tachyscope_fpga.errors import TachyscopeError
from tachyscope_fpga.model import cycle_model
from tachyscope_fpga.parts.core import Core, CoreUnit
from tachyscope_fpga.parts.drs import RowScheduler, RowSchedulerUnit
from tachyscope_fpga.parts.fixed import ACC_BITS, Ints, check_range, index
from tachyscope_fpga.parts.gemv import GemvArray
from tachyscope_fpga.parts.replay_cache import ReplayCache, ReplayCacheUnit
from tachyscope_fpga.parts.tas_gate import TasGate, TasGateUnit


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


class _Signals:
    """What the steps of ``EngineUnit`` share."""

    def __init__(self, engine: Engine) -> None:
        rows = engine.rows
        self.phase = Signal(Phase)
        self.scoring = Signal()
        self.x_done = Signal()  # all rows' activations are in the cores
        self.scored = Signal()  # and all their scores in the gate
        self.row = Signal(index(rows))  # whose verdict is next
        self.asked = Signal()  # the cache for it
        self.entries = Array(
            Signal(index(engine.cache.entries), name=f"entry{r}") for r in range(rows)
        )
        self.shown = Signal()  # a result
        self.made = Signal(range(rows * engine.core.tiles + 1))
        self.sealing = Signal(index(rows))


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
        m.submodules.gate = gate = engine.gate.create()
        m.submodules.cache = cache = engine.cache.create()
        m.submodules.drs = drs = engine.scheduler.create()
        cores = [engine.core.create() for _ in range(engine.cores)]
        for number, core in enumerate(cores):
            m.submodules[f"core{number}"] = core
        s = _Signals(engine)
        m.d.comb += [self.phase.eq(s.phase), s.scoring.eq(s.phase == Phase.SCORE)]
        self._take_activations(m, s, cores)
        self._take_scores(m, s, gate)
        self._decide(m, s, gate, cache, drs)
        self._clear(m, s, cache)
        self._run(m, s, cores, cache, drs)
        self._merge(m, s, cores, cache)
        self._seal(m, s, cache, drs)
        self._phases(m, s, drs)
        return m

    def _take_activations(self, m: Module, s: _Signals, cores: Sequence[CoreUnit]) -> None:
        """Into every core, row by row."""
        rows, beats = self.params.rows, self.params.core.beats
        row, beat = Signal(index(rows)), Signal(index(beats))
        m.d.comb += self.x.ready.eq(s.scoring & ~s.x_done)
        for core in cores:
            m.d.comb += [
                core.x.valid.eq(self.x.valid & self.x.ready),
                core.x.p.eq(Cat(row, beat, self.x.payload.as_value())),
            ]
        with m.If(self.x.valid & self.x.ready):
            m.d.sync += beat.eq(beat + 1)
            with m.If(beat == beats - 1):
                m.d.sync += [beat.eq(0), row.eq(row + 1)]
                with m.If(row == rows - 1):
                    m.d.sync += [row.eq(0), s.x_done.eq(1)]

    def _take_scores(self, m: Module, s: _Signals, gate: TasGateUnit) -> None:
        """The gate's beats of all rows of a step, and no more."""
        count = self.params.gate.beats * self.params.rows
        left, open = Signal(index(count)), s.scoring & ~s.scored
        m.d.comb += [
            gate.i.valid.eq(self.score.valid & open),
            self.score.ready.eq(gate.i.ready & open),
            gate.i.p.eq(self.score.p),
        ]
        with m.If(gate.i.valid & gate.i.ready):
            m.d.sync += left.eq(left + 1)
            with m.If(left == count - 1):
                m.d.sync += [left.eq(0), s.scored.eq(1)]

    def _decide(
        self,
        m: Module,
        s: _Signals,
        gate: TasGateUnit,
        cache: ReplayCacheUnit,
        drs: RowSchedulerUnit,
    ) -> None:
        """The gate's verdict, where the cache has something to replay; the last waits for x."""
        rows = self.params.rows
        entry = s.row * self.params.positions + self.command.p.position
        last = s.row == rows - 1
        verdict = s.scoring & gate.o.valid & cache.hit.valid & (s.x_done | ~last)
        m.d.comb += [
            gate.threshold.valid.eq(self.command.valid & s.scoring),
            gate.threshold.payload.eq(self.command.p.threshold),
            cache.ask.valid.eq(self.command.valid & s.scoring & ~s.asked & ~cache.clear.valid),
            cache.ask.payload.eq(entry),
            drs.verdict.valid.eq(verdict),
            drs.verdict.p.row.eq(s.row),
            drs.verdict.p.replay.eq(gate.o.payload & cache.hit.payload),
            gate.o.ready.eq(verdict & drs.verdict.ready),
            cache.hit.ready.eq(verdict & drs.verdict.ready),
            self.command.ready.eq(verdict & drs.verdict.ready),
        ]
        with m.If(cache.ask.valid & cache.ask.ready):
            m.d.sync += [s.asked.eq(1), s.entries[s.row].eq(entry)]
        with m.If(self.command.valid & self.command.ready):
            m.d.sync += [s.asked.eq(0), s.row.eq(s.row + 1)]
            with m.If(last):
                m.d.sync += s.row.eq(0)

    def _clear(self, m: Module, s: _Signals, cache: ReplayCacheUnit) -> None:
        """Between steps alone."""
        between = s.scoring & (s.row == 0) & ~s.asked
        m.d.comb += [
            cache.clear.valid.eq(self.clear.valid & between),
            self.clear.ready.eq(cache.clear.ready & between),
        ]

    def _run(
        self,
        m: Module,
        s: _Signals,
        cores: Sequence[CoreUnit],
        cache: ReplayCacheUnit,
        drs: RowSchedulerUnit,
    ) -> None:
        """The scheduler's jobs to the cores, its replays to the cache."""
        m.d.comb += [
            cache.read.valid.eq(drs.replays.valid),
            cache.read.p.entry.eq(s.entries[drs.replays.payload]),
            cache.read.p.tag.eq(drs.replays.payload),
            drs.replays.ready.eq(cache.read.ready),
        ]
        wiring.connect(m, wiring.flipped(self.dealt), drs.dealt)
        for number, core in enumerate(cores):
            wiring.connect(m, drs.jobs[number], core.job)
            wiring.connect(m, wiring.flipped(self.weights[number]), core.weights)
            wiring.connect(m, wiring.flipped(self.scale[number]), core.scale)

    def _merge(
        self, m: Module, s: _Signals, cores: Sequence[CoreUnit], cache: ReplayCacheUnit
    ) -> None:
        """Results: the lowest core that has one, then replays; computed ones also to the cache."""
        out = Signal(self.result)
        accept = (~s.shown | self.o.ready) & cache.write.ready & (s.phase != Phase.SEAL)
        m.d.comb += [self.o.valid.eq(s.shown), self.o.p.eq(out)]
        with m.If(self.o.ready):
            m.d.sync += s.shown.eq(0)
        blocked = Signal(len(cores) + 1)
        for number, core in enumerate(cores):
            m.d.comb += [
                core.o.ready.eq(accept & ~blocked[number]),
                blocked[number + 1].eq(blocked[number] | core.o.valid),
            ]
            with m.If(core.o.valid & core.o.ready):
                m.d.comb += [
                    cache.write.valid.eq(1),
                    cache.write.p.entry.eq(s.entries[core.o.p.row]),
                    cache.write.p.tile.eq(core.o.p.tile),
                    cache.write.p.y.eq(core.o.p.y),
                ]
                m.d.sync += [
                    s.shown.eq(1),
                    s.made.eq(s.made + 1),
                    out.eq(Cat(core.o.p.as_value(), Const(0, 1))),
                ]
        m.d.comb += cache.o.ready.eq(accept & ~blocked[-1])
        with m.If(cache.o.valid & cache.o.ready):
            m.d.sync += [
                s.shown.eq(1),
                s.made.eq(s.made + 1),
                out.row.eq(cache.o.p.tag),
                out.tile.eq(cache.o.p.tile),
                out.y.eq(cache.o.p.y),
                out.replayed.eq(1),
            ]

    def _seal(self, m: Module, s: _Signals, cache: ReplayCacheUnit, drs: RowSchedulerUnit) -> None:
        """What was computed becomes valid, row by row."""
        m.d.comb += [
            cache.seal.valid.eq((s.phase == Phase.SEAL) & drs.index.bit_select(s.sealing, 1)),
            cache.seal.payload.eq(s.entries[s.sealing]),
        ]

    def _phases(self, m: Module, s: _Signals, drs: RowSchedulerUnit) -> None:
        rows, results = self.params.rows, self.params.rows * self.params.core.tiles
        with m.Switch(s.phase):
            with m.Case(Phase.SCORE):
                with m.If(drs.verdict.valid & drs.verdict.ready & (s.row == rows - 1)):
                    m.d.sync += [s.phase.eq(Phase.RUN), s.x_done.eq(0), s.scored.eq(0)]
            with m.Case(Phase.RUN):
                with m.If(drs.verdict.ready):
                    m.d.sync += s.phase.eq(Phase.DRAIN)
            with m.Case(Phase.DRAIN):
                with m.If((s.made == results) & (~s.shown | self.o.ready)):
                    m.d.sync += [s.phase.eq(Phase.SEAL), s.made.eq(0)]
            with m.Case(Phase.SEAL):
                m.d.sync += s.sealing.eq(s.sealing + 1)
                with m.If(s.sealing == rows - 1):
                    m.d.sync += [s.sealing.eq(0), s.phase.eq(Phase.SCORE)]
