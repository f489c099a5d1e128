"""What ``top.TopUnit`` does in order: load the rows, run passes over the cores, replay, add."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from amaranth.hdl import Array, Cat, Module, Mux, Signal
from amaranth.lib import data, fifo
from amaranth.lib.memory import ReadPort, WritePort

from tachyscope_fpga.decoder.core import DecoderCoreUnit
from tachyscope_fpga.parts.counters import CountersUnit
from tachyscope_fpga.parts.csr import CsrBankUnit
from tachyscope_fpga.parts.drs import RowSchedulerUnit
from tachyscope_fpga.parts.fixed import index
from tachyscope_fpga.parts.replay_cache import ReplayCacheUnit
from tachyscope_fpga.parts.streamers import StreamerUnit
from tachyscope_fpga.parts.vector import wide_vector

if TYPE_CHECKING:
    from tachyscope_fpga.decoder.top import Top, TopUnit


@dataclass(frozen=True)
class Units:
    """The units inside ``TopUnit``; `put` and `get` are the ports of the rows' memory."""

    bank: CsrBankUnit
    counters: CountersUnit
    cache: ReplayCacheUnit
    drs: RowSchedulerUnit
    weights: StreamerUnit
    scales: StreamerUnit
    put: WritePort
    get: ReadPort
    cores: list[DecoderCoreUnit]
    outs: list[fifo.SyncFIFOBuffered]


class TokenSignals:
    """What the steps of a token share."""

    def __init__(self, p: Top, units: Units) -> None:
        shape, rows = p.core.shape, p.rows
        beats = shape.width // p.core.lanes
        self.busy = Signal()
        self.layer = Signal(index(shape.layers))
        self.in_mlp = Signal()
        self.in_norm = Signal()
        self.active = Signal(p.cores)  # cores that have a row in this pass
        self.rows_of = Signal(data.ArrayLayout(index(rows), p.cores))  # the row that a core has
        self.first = Signal(range(rows + p.cores))  # the first row of a pass
        self.left = Signal(range(rows + 1))  # rows that still compute
        self.dealt = Signal(range(p.cores + 1))
        self.finish = Signal()  # the pass is over: its jobs are taken
        self.verdicts = Signal(rows)
        self.replayed = [Signal(rows, name=f"replayed{n}") for n in range(shape.layers)]
        self.computed = Signal()  # events
        self.replays = Signal()
        # the row and the core at hand, and the beat of the row's memory
        self.row = Signal(index(rows))
        self.beat = Signal(index(beats))
        self.core_at = Signal(index(p.cores))
        self.last_beat = self.beat == beats - 1
        self.give = Signal()  # a job to the core
        self.feed = Signal()  # the row to the core
        self.step = Signal()  # to the next beat
        self.add = Signal()  # what the core or the cache gives is added to the row
        self.from_cache = Signal()
        self.send_w = Signal()  # order the pass's weights and scales
        self.send_s = Signal()
        cores, outs = units.cores, units.outs
        self.job_taken = Array(core.job.ready for core in cores)[self.core_at]
        self.x_taken = Array(core.x.ready for core in cores)[self.core_at]
        self.out_valid = Array(out.r_rdy for out in outs)[self.core_at]
        self.out_data = data.View(
            wide_vector(p.core.lanes), Array(out.r_data for out in outs)[self.core_at]
        )


def states(m: Module, top: TopUnit, units: Units, token: TokenSignals) -> None:
    """The state machine of a token."""
    with m.FSM():
        _load(m, top, units, token)
        _begin_pass(m, top, units, token)
        _hand_out(m, top, token)
        _collect(m, top, units, token)
        _end_pass(m, top, token)
        _decide(m, top, units, token)
        _replay(m, units, token)
        _next_layer(m, top, token)


def _load(m: Module, top: TopUnit, units: Units, token: TokenSignals) -> None:
    """The rows' inputs into their memory, once started."""
    t = token
    with m.State("IDLE"):
        with m.If(units.bank.reg_ctrl[0][0]):
            m.d.sync += [t.busy.eq(1), t.row.eq(0), t.beat.eq(0), t.layer.eq(0)]
            m.next = "LOAD"
    with m.State("LOAD"):
        m.d.comb += [
            top.x.ready.eq(1),
            units.put.en.eq(top.x.valid),
            t.step.eq(top.x.valid),
        ]
        with m.If(t.step & t.last_beat):
            m.d.sync += t.row.eq(t.row + 1)
            with m.If(t.row == top.params.rows - 1):
                m.d.sync += [t.row.eq(0), t.first.eq(0), t.in_mlp.eq(0), t.in_norm.eq(0)]
                m.next = "PASS"


def _begin_pass(m: Module, top: TopUnit, units: Units, token: TokenSignals) -> None:
    """Which core has which row, and the pass's weights."""
    t, p, jobs = token, top.params, units.drs.jobs
    with m.State("PASS"):
        # attention's passes take rows in order; its first core's row is `first`
        m.d.sync += [t.core_at.eq(0), t.active.eq(0)]
        with m.If(t.in_mlp):
            with m.If(t.left == 0):
                m.next = "NEXT"
            with m.Elif(t.dealt == Mux(t.left > p.cores, p.cores, t.left)):
                m.d.sync += [
                    *(t.rows_of[n].eq(slot.p.row) for n, slot in enumerate(jobs)),
                    t.active.eq(Cat(slot.valid for slot in jobs)),
                    t.send_w.eq(1),
                    t.send_s.eq(1),
                ]
                m.next = "GIVE"
        with m.Else():
            m.d.sync += [t.rows_of[n].eq(t.first + n) for n in range(p.cores)]
            m.d.sync += [
                t.active.eq(Cat(t.first + n < p.rows for n in range(p.cores))),
                t.send_w.eq(~t.in_norm),
                t.send_s.eq(~t.in_norm),
            ]
            m.next = "GIVE"


def _hand_out(m: Module, top: TopUnit, token: TokenSignals) -> None:
    """A job and a row to every core that has one."""
    t, cores = token, top.params.cores
    with m.State("GIVE"):
        # cores without a row are passed over
        with m.If(t.active.bit_select(t.core_at, 1)):
            m.d.sync += [t.row.eq(t.rows_of[t.core_at]), t.beat.eq(0)]
            m.next = "JOB"
        with m.Elif(t.core_at == cores - 1):
            m.d.sync += t.core_at.eq(0)
            m.next = "TAKE"
        with m.Else():
            m.d.sync += t.core_at.eq(t.core_at + 1)
    with m.State("JOB"):
        m.d.comb += t.give.eq(1)
        with m.If(t.job_taken):
            m.next = "FEED"
    with m.State("FEED"):
        m.d.comb += [t.feed.eq(1), t.step.eq(t.x_taken)]
        with m.If(t.step & t.last_beat):
            with m.If(t.core_at == cores - 1):
                m.d.sync += t.core_at.eq(0)
                m.next = "TAKE"
            with m.Else():
                m.d.sync += t.core_at.eq(t.core_at + 1)
                m.next = "GIVE"


def _collect(m: Module, top: TopUnit, units: Units, token: TokenSignals) -> None:
    """A core's result is added to its row, or is the row's state; an MLP's is kept too."""
    t, cores, cache = token, top.params.cores, units.cache
    with m.State("TAKE"):
        with m.If(t.active.bit_select(t.core_at, 1)):
            m.d.sync += [t.row.eq(t.rows_of[t.core_at]), t.beat.eq(0)]
            m.next = "AHEAD"
        with m.Elif(t.core_at == cores - 1):
            m.next = "TAKEN"
        with m.Else():
            m.d.sync += t.core_at.eq(t.core_at + 1)
    with m.State("AHEAD"):
        m.next = "ADD"
    with m.State("ADD"):
        goes = Mux(t.in_norm, top.o.ready, Mux(t.in_mlp, cache.write.ready, 1))
        taken = (out.r_en.eq(t.step & (t.core_at == n)) for n, out in enumerate(units.outs))
        m.d.comb += [
            top.o.valid.eq(t.in_norm & t.out_valid),
            top.o.payload.eq(t.out_data),
            cache.write.valid.eq(t.in_mlp & t.out_valid),
            t.add.eq(1),
            t.step.eq(t.out_valid & goes),
            units.put.en.eq(t.step & ~t.in_norm),
            *taken,
        ]
        with m.If(t.step & t.last_beat):
            m.next = "ADDED"
    with m.State("ADDED"):
        m.d.comb += [
            cache.seal.valid.eq(t.in_mlp),
            t.computed.eq(t.in_mlp & cache.seal.ready),
        ]
        with m.If(~t.in_mlp | cache.seal.ready):
            with m.If(t.core_at == cores - 1):
                m.next = "TAKEN"
            with m.Else():
                m.d.sync += t.core_at.eq(t.core_at + 1)
                m.next = "TAKE"


def _end_pass(m: Module, top: TopUnit, token: TokenSignals) -> None:
    """To the rows that are left, or on to the layer's next half."""
    t, p = token, top.params
    with m.State("TAKEN"):
        m.d.sync += t.active.eq(0)
        with m.If(t.in_mlp):
            m.d.comb += t.finish.eq(1)
            m.d.sync += t.left.eq(t.left - t.dealt)
            m.next = "PASS"
        with m.Elif(t.first + p.cores >= p.rows):
            m.d.sync += [t.row.eq(0), t.first.eq(0), t.left.eq(0)]
            with m.If(t.in_norm):
                m.d.sync += t.busy.eq(0)
                m.next = "IDLE"
            with m.Else():
                m.next = "ASK"
        with m.Else():
            m.d.sync += t.first.eq(t.first + p.cores)
            m.next = "PASS"


def _decide(m: Module, top: TopUnit, units: Units, token: TokenSignals) -> None:
    """Row by row: its TAS passed and its entry is whole, so its MLP replays; else it is dealt."""
    t, cache, drs = token, units.cache, units.drs
    with m.State("ASK"):
        m.d.comb += cache.ask.valid.eq(1)
        with m.If(cache.ask.ready):
            m.next = "DECIDE"
    with m.State("DECIDE"):
        replay = drs.verdict.p.replay
        m.d.comb += [
            drs.verdict.valid.eq(cache.hit.valid),
            cache.hit.ready.eq(drs.verdict.ready),
            t.replays.eq(cache.hit.valid & drs.verdict.ready & replay),
        ]
        with m.If(cache.hit.valid & drs.verdict.ready):
            m.d.sync += Array(t.replayed)[t.layer].bit_select(t.row, 1).eq(replay)
            m.d.sync += [t.left.eq(t.left + ~replay), t.row.eq(t.row + 1)]
            m.next = "ASK"
            with m.If(t.row == top.params.rows - 1):
                m.d.sync += t.in_mlp.eq(1)
                m.next = "REPLAYS"


def _replay(m: Module, units: Units, token: TokenSignals) -> None:
    """Rows that replay: what the cache kept of them is added."""
    t, cache, replays = token, units.cache, units.drs.replays
    with m.State("REPLAYS"):
        # the scheduler names the rows; then it deals
        m.d.comb += replays.ready.eq(1)
        with m.If(replays.valid):
            m.d.sync += [t.row.eq(replays.payload), t.beat.eq(0)]
            m.next = "READ"
        with m.Else():
            m.next = "PASS"
    with m.State("READ"):
        m.d.comb += cache.read.valid.eq(1)
        with m.If(cache.read.ready):
            m.next = "REPLAY"
    with m.State("REPLAY"):
        m.d.comb += [
            t.from_cache.eq(1),
            t.add.eq(1),
            cache.o.ready.eq(1),
            t.step.eq(cache.o.valid),
            units.put.en.eq(t.step),
        ]
        with m.If(t.step & t.last_beat):
            m.next = "REPLAYS"


def _next_layer(m: Module, top: TopUnit, token: TokenSignals) -> None:
    """The next layer's attention; after the last layer the norm."""
    t = token
    with m.State("NEXT"):
        m.d.sync += [t.in_mlp.eq(0), t.layer.eq(t.layer + 1), t.first.eq(0)]
        with m.If(t.layer == top.params.core.shape.layers - 1):
            m.d.sync += [t.in_norm.eq(1), t.layer.eq(0)]
        m.next = "PASS"
