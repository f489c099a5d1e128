"""What ``core.DecoderCoreUnit`` does in order: attention after its gate, an MLP, or a norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from amaranth.hdl import Module, Mux, Signal, Value

from tachyscope_fpga.decoder.job import Phase, Work, job_layout
from tachyscope_fpga.parts.attention_unit import AttentionHardware
from tachyscope_fpga.parts.fixed import index
from tachyscope_fpga.parts.gemv import GemvArrayUnit
from tachyscope_fpga.parts.int8_buffer import Int8BufferUnit
from tachyscope_fpga.parts.requant import RequantUnit
from tachyscope_fpga.parts.rms_norm import RmsNormUnit
from tachyscope_fpga.parts.rope import RopeUnit
from tachyscope_fpga.parts.silu_mul import SiluMulUnit
from tachyscope_fpga.parts.streamers import KvStreamerUnit
from tachyscope_fpga.parts.tas_gate import TasGateUnit
from tachyscope_fpga.parts.vector import MAX_EXPONENT

if TYPE_CHECKING:
    from tachyscope_fpga.decoder.core import DecoderCore, DecoderCoreUnit


@dataclass(frozen=True)
class Units:
    """The units inside ``DecoderCoreUnit``; from `outer` on its buffers and readers."""

    norm: RmsNormUnit
    rope: RopeUnit
    silu: SiluMulUnit
    array: GemvArrayUnit
    requant: RequantUnit
    gate: TasGateUnit
    attention: AttentionHardware
    outer: Int8BufferUnit
    inner: Int8BufferUnit
    q: Int8BufferUnit
    k: Int8BufferUnit
    v: Int8BufferUnit
    k_reader: KvStreamerUnit
    v_reader: KvStreamerUnit


class JobSignals:
    """What the steps of a job share."""

    def __init__(self, p: DecoderCore) -> None:
        self.shape = s = p.shape
        self.job = Signal(job_layout(s))
        kinds = (Work.ATTEND, Work.MLP, Work.NORM)
        self.attend, self.mlp, self.only_norm = (self.job.work == kind for kind in kinds)
        self.begin = Signal()
        self.attending = Signal()  # attention's output begins
        self.outer_in = Signal()  # attention's output comes, not the norm's
        self.finished = Signal()  # the last beat leaves
        # the key/value head at hand, and its query
        self.head = Signal(index(s.kv_heads))
        self.query = Signal(index(s.group))
        self.last_query = self.query == s.group - 1
        self.q_exponent = Signal(range(MAX_EXPONENT + 1))
        self.gating = Signal()  # queries and keys are the gate's
        self.scored = Signal()
        self.k_order = Signal()
        self.v_order = Signal()
        self.waits = Signal()  # an order was not taken yet

    def base(self, kind: int) -> Value:
        """The address of entry 0 of the head at hand: of keys (0) or values (1)."""
        s = self.shape
        return ((self.job.slot * 2 + kind) * s.kv_heads + self.head) * s.context


def states(m: Module, core: DecoderCoreUnit, units: Units, job: JobSignals) -> None:
    """The state machine of a job."""
    with m.FSM():
        _begin(m, core, job)
        _store(m, core, units, job)
        _gate(m, core, units, job)
        _attend(m, core, job)
        for phase in (Phase.MLP, Phase.NORM):
            with m.State(phase.name):
                m.d.comb += core.phase.eq(phase)
                with m.If(job.finished):
                    m.next = "IDLE"


def _begin(m: Module, core: DecoderCoreUnit, job: JobSignals) -> None:
    j = job
    with m.State("IDLE"):
        m.d.comb += [core.phase.eq(Phase.IDLE), core.job.ready.eq(1)]
        m.d.sync += [j.outer_in.eq(0), j.head.eq(0)]
        with m.If(core.job.valid):
            m.d.sync += j.job.eq(core.job.payload)
            m.next = "BEGIN"
    with m.State("BEGIN"):
        m.d.comb += [core.phase.eq(Phase.PROJECT), j.begin.eq(1)]
        with m.Switch(j.job.work):
            with m.Case(Work.ATTEND):
                m.next = "STORE_K"
            with m.Case(Work.MLP):
                m.next = "MLP"
            with m.Default():
                m.next = "NORM"


def _store(m: Module, core: DecoderCoreUnit, units: Units, job: JobSignals) -> None:
    """The token's own key and value into the KV cache, head by head."""
    j, write = job, core.kv_write
    for name, buffer, after in (("K", units.k, "STORE_V"), ("V", units.v, "GATE")):
        with m.State(f"STORE_{name}"):
            m.d.comb += [
                core.phase.eq(Mux(buffer.o.valid, Phase.STORE, Phase.PROJECT)),
                write.valid.eq(buffer.o.valid),
                write.p.address.eq(j.base(name == "V") + j.job.index),
                write.p.entry.x.eq(buffer.o.p.x),
                write.p.entry.exponent.eq(buffer.o.p.exponent),
                buffer.o.ready.eq(write.ready),
            ]
            with m.If(write.valid & write.ready):
                m.d.sync += j.head.eq(j.head + 1)
                with m.If(j.head == j.shape.kv_heads - 1):
                    m.d.sync += j.head.eq(0)
                    m.next = after


def _gate(m: Module, core: DecoderCoreUnit, units: Units, job: JobSignals) -> None:
    """The verdict: by the gate's score, or without one where the gate may not decide."""
    j, gate = job, units.gate
    with m.State("GATE"):
        m.d.comb += core.phase.eq(Phase.GATE)
        with m.If(j.job.gate):
            m.d.comb += [j.gating.eq(1), j.k_order.eq(1)]
            m.next = "SCORE"
        with m.Else():
            m.d.comb += core.verdict.valid.eq(1)
            with m.If(core.verdict.ready):
                m.next = "ORDER"
    with m.State("SCORE"):
        m.d.comb += [core.phase.eq(Phase.GATE), j.gating.eq(1)]
        with m.If(j.scored & j.last_query):
            m.d.sync += j.head.eq(j.head + 1)
            with m.If(j.head == j.shape.kv_heads - 1):
                m.d.sync += j.head.eq(0)
                m.next = "VERDICT"
            with m.Else():
                m.next = "GATE"
    with m.State("VERDICT"):
        m.d.comb += [
            core.phase.eq(Phase.GATE),
            j.gating.eq(1),
            gate.threshold.valid.eq(1),
            core.verdict.valid.eq(gate.o.valid),
            core.verdict.payload.eq(gate.o.payload),
            gate.o.ready.eq(core.verdict.ready),
        ]
        with m.If(core.verdict.valid & core.verdict.ready):
            m.next = "ORDER"


def _attend(m: Module, core: DecoderCoreUnit, job: JobSignals) -> None:
    """A head's keys and values are ordered; the next head's once these orders are taken."""
    j = job
    with m.State("ORDER"):
        m.d.comb += core.phase.eq(Phase.ATTEND)
        m.d.sync += j.outer_in.eq(1)
        with m.If(j.outer_in):
            m.d.comb += j.attending.eq(j.head == 0)
            m.d.comb += [j.k_order.eq(1), j.v_order.eq(1)]
            m.next = "ATTEND"
    with m.State("ATTEND"):
        m.d.comb += core.phase.eq(Phase.ATTEND)
        with m.If(~j.waits & (j.head != j.shape.kv_heads - 1)):
            m.d.sync += j.head.eq(j.head + 1)
            m.next = "ORDER"
        with m.If(j.finished):
            m.next = "IDLE"
