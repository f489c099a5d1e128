"""Attention of one token: scores against every entry, softmax by a table of 2**-x, values' mean."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from amaranth.hdl import Array, Cat, Const, Module, Mux, Signal, signed
from amaranth.lib import data, fifo, stream, wiring
from amaranth.lib.memory import Memory, ReadPort, WritePort
from amaranth.lib.wiring import In, Out

from tachyscope_fpga.parts.fixed import (
    ACC_BITS,
    Ints,
    ceil_log2,
    check_multiple,
    check_range,
    round_shift,
    saturate,
    saturated,
)
from tachyscope_fpga.parts.gemv import GemvArray
from tachyscope_fpga.parts.pipe import Outbox, delayed
from tachyscope_fpga.parts.serial import Divide
from tachyscope_fpga.parts.vector import FRACTION, MAX_EXPONENT, WIDE, bit_length, wide_vector

LOGIT_BITS = 20  # a logit in base 2, eight bits of it a fraction
TABLE_BITS = 8
WEIGHT_BITS = 16  # of exp2: the largest logit weighs 65535


def powers() -> Ints:
    """65535 * 2**(-i / 256), i from 0 to 255."""
    return np.floor(65535 * np.exp2(-np.arange(1 << TABLE_BITS) / 256) + 0.5).astype(np.int64)


@dataclass(frozen=True)
class AttentionUnit:
    """`group` query heads of `head_dim` over entries of one key/value head, one entry a cycle.

    Queries, keys and values are int8 with an exponent a vector (`vector.py`). A logit is
    q . k * multiplier >> (shift - both exponents), rounded half up: base 2, in 2**-8; its weight is
    65535 * 2**-(highest - logit) by a table of 256 and a shift. Values are summed exactly, and
    their sum is multiplied by 2**31 // (the weights' sum brought to 16 bits).

    Which entries there are is the KV streamer's: all, or a sink and a window.
    """

    head_dim: int
    group: int = 1
    context: int = 4096
    lanes: int = 4

    WEIGHING: ClassVar[int] = 6  # from a value to its place in the sum
    OUT: ClassVar[int] = 4

    def __post_init__(self) -> None:
        check_range("AttentionUnit head_dim", self.head_dim, 2, 256)
        check_range("AttentionUnit group", self.group, 1, 64)
        check_range("AttentionUnit context", self.context, 2, 65536)
        check_range("AttentionUnit lanes", self.lanes, 1, 64)
        check_multiple("AttentionUnit head_dim", self.head_dim, "lanes", self.lanes)

    @property
    def multiplier(self) -> int:
        """log2(e) / sqrt(head_dim), brought to 15 bits."""
        return math.floor(self._scale * 2.0 ** (14 - self._top) + 0.5)

    @property
    def shift(self) -> int:
        return 14 - self._top + 2 * FRACTION - TABLE_BITS

    @property
    def _scale(self) -> float:
        return math.log2(math.e) / math.sqrt(self.head_dim)

    @property
    def _top(self) -> int:
        return math.floor(math.log2(self._scale))

    def logits(self, q: Ints, q_exponent: int, k: Ints, k_exponents: Ints) -> Ints:
        """q [G, D], k [N, D] -> [G, N]."""
        dots = (q.astype(np.float64) @ k.T.astype(np.float64)).astype(np.int64)
        shift = np.maximum(self.shift - q_exponent - k_exponents, 0)
        return saturate(round_shift(dots * self.multiplier, shift), LOGIT_BITS)

    def compute(
        self, q: Ints, q_exponent: int, k: Ints, k_exponents: Ints, v: Ints, v_exponents: Ints
    ) -> Ints:
        """q [G, D], k, v [N, D] int8, exponents [N] -> [G, D] wide."""
        t = self.logits(q, q_exponent, k, k_exponents)
        below = t.max(-1, keepdims=True) - t
        whole = below >> TABLE_BITS
        weight = powers()[below & 255]
        weight = np.where(whole < WEIGHT_BITS, round_shift(weight, np.minimum(whole, 15)), 0)
        # sums stay below 2**53, so that a product of doubles is exact
        scaled = (v << v_exponents[:, None]).astype(np.float64)
        total = (weight.astype(np.float64) @ scaled).astype(np.int64)
        mass = weight.sum(-1, keepdims=True)
        extra = np.frexp(mass.astype(np.float64))[1].astype(np.int64) - WEIGHT_BITS
        reciprocal = (np.int64(1) << 31) // (mass >> extra)
        return saturate(round_shift((total >> extra) * reciprocal, 31), WIDE)

    @property
    def array(self) -> GemvArray:
        return GemvArray(self.group, self.head_dim)

    def cycles(self, entries: int) -> int:
        """From the job to the last beat out, when queries, keys and values are waiting."""
        scores = entries + self.array.latency + 3
        weights = entries + self.WEIGHING + 1
        quotients = self.group * (Divide().cycles() + 1)
        out = self.group * self.head_dim // self.lanes + self.OUT
        return 1 + self.group + scores + weights + quotients + out

    def entry_layout(self) -> data.StructLayout:
        """A key or a value as the cache holds it."""
        vector = data.ArrayLayout(signed(8), self.head_dim)
        return data.StructLayout({"x": vector, "exponent": range(MAX_EXPONENT + 1)})

    def create(self) -> AttentionHardware:
        return AttentionHardware(self)


class _Signals:
    """What the steps of ``AttentionHardware`` share."""

    def __init__(self, p: AttentionUnit) -> None:
        group, count = p.group, range(p.context + 1)
        self.entries = Signal(count)
        self.exponent = Signal(range(MAX_EXPONENT + 1))  # of the queries
        self.queries = Signal(data.ArrayLayout(data.ArrayLayout(signed(8), p.head_dim), group))
        self.head = Signal(range(group + 1))
        self.key = Signal()  # one is taken in this cycle
        self.value = Signal()
        self.taken = Signal(count)  # keys, then values
        self.scoring = Signal()
        self.weighing = Signal()
        self.stored = Signal(count)  # scores in memory
        self.first = Signal()
        self.highest = [Signal(signed(LOGIT_BITS), name=f"highest{h}") for h in range(group)]
        # sums, by head
        self.mass_bits = bits = WEIGHT_BITS + ceil_log2(p.context)
        total = signed(bits + MAX_EXPONENT + 8)
        self.masses = [Signal(bits, name=f"mass{h}") for h in range(group)]
        self.totals = [Signal(total, name=f"total{n}") for n in range(group * p.head_dim)]
        self.clear = Signal()
        self.extra = Signal(range(bits))  # bits of the mass that the divider leaves out
        self.extras = [Signal(range(bits), name=f"extra{h}") for h in range(group)]
        self.reciprocals = [Signal(Divide.BITS, name=f"reciprocal{h}") for h in range(group)]
        # out
        self.move = Signal()
        self.beat = Signal(range(p.head_dim // p.lanes))


class AttentionHardware(wiring.Component):
    """One job at a time: queries, then one key a cycle, then one value a cycle, then the result.

    Members
    -------
    job : In(stream of {entries, exponent})
        How many entries there are (1 to context), and the queries' exponent.
    q : In(stream of `head_dim` signed(8))
        `group` beats.
    k, v : In(stream of {x: `head_dim` signed(8), exponent})
        As many beats each as there are entries, in the same order; all keys are taken first.
    o : Out(stream of `lanes` signed(24))
        `group * head_dim / lanes` beats, head after head.
    """

    def __init__(self, params: AttentionUnit) -> None:
        self.params = params
        job = data.StructLayout(
            {"entries": range(params.context + 1), "exponent": range(MAX_EXPONENT + 1)}
        )
        entry = stream.Signature(params.entry_layout())
        super().__init__(
            {
                "job": In(stream.Signature(job)),
                "q": In(stream.Signature(data.ArrayLayout(signed(8), params.head_dim))),
                "k": In(entry),
                "v": In(entry),
                "o": Out(stream.Signature(wide_vector(params.lanes))),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        p = self.params
        m.submodules.array = self._array = p.array.create()
        m.submodules.outbox = self._outbox = Outbox(wide_vector(p.lanes), depth=p.OUT + 2)
        m.submodules.divide = self._divide = Divide().create()
        wiring.connect(m, wiring.flipped(self.o), self._outbox.o)
        s = _Signals(p)
        self._count(m, s)
        logits = data.ArrayLayout(signed(LOGIT_BITS), p.group)
        m.submodules.scores = scores = Memory(shape=logits, depth=p.context, init=[])
        self._score(m, s, scores.write_port())
        self._weigh(m, s, scores.read_port())
        self._sum_mass(m, s)
        self._send(m, s)
        with m.FSM():
            self._take_inputs(m, s)
            self._finish(m, s)
        return m

    def _count(self, m: Module, s: _Signals) -> None:
        """Keys that were taken, then values."""
        m.d.comb += [
            s.key.eq(self.k.valid & self.k.ready),
            s.value.eq(self.v.valid & self.v.ready),
            self.v.ready.eq(s.weighing & (s.taken != s.entries)),
        ]
        with m.If(s.key | s.value):
            m.d.sync += s.taken.eq(s.taken + 1)

    def _score(self, m: Module, s: _Signals, put: WritePort) -> None:
        """One key a cycle against all queries; the dot products' exponents wait for them."""
        p, array = self.params, self._array
        m.submodules.exponents = exponents = fifo.SyncFIFO(
            width=len(self.k.p.exponent), depth=array.params.latency + 3
        )
        room = array.i.ready & exponents.w_rdy
        m.d.comb += [
            self.k.ready.eq(s.scoring & (s.taken != s.entries) & room),
            array.i.valid.eq(s.key),
            array.i.p.w.eq(s.queries),
            array.i.p.x.eq(self.k.p.x),
            array.i.p.last.eq(1),
            exponents.w_en.eq(s.key),
            exponents.w_data.eq(self.k.p.exponent),
            array.o.ready.eq(1),
            exponents.r_en.eq(array.o.valid),
        ]
        shift, half = Signal(range(p.shift + 1)), Signal(p.shift)
        both = s.exponent + exponents.r_data
        halves = Array([Const(0, p.shift), *(Const(1 << n, p.shift) for n in range(p.shift))])
        m.d.sync += shift.eq(Mux(both > p.shift, 0, p.shift - both))
        m.d.sync += half.eq(halves[Mux(both > p.shift, 0, p.shift - both)])
        shift_later = delayed(m, shift, 1)
        scored = delayed(m, array.o.valid, 3)
        m.d.comb += [put.en.eq(scored), put.addr.eq(s.stored)]
        for h, highest in enumerate(s.highest):
            product = Signal(signed(ACC_BITS + 16))
            rounded = Signal(signed(ACC_BITS + 17))
            logit = Signal(signed(LOGIT_BITS))
            m.d.sync += [
                product.eq(array.o.p[h] * p.multiplier),
                rounded.eq(product + half),
                logit.eq(saturated(rounded >> shift_later, LOGIT_BITS)),
            ]
            m.d.comb += put.data[h].eq(logit)
            with m.If(scored & (s.first | (logit > highest))):
                m.d.sync += highest.eq(logit)
        with m.If(scored):
            m.d.sync += [s.stored.eq(s.stored + 1), s.first.eq(0)]

    def _weigh(self, m: Module, s: _Signals, get: ReadPort) -> None:
        """One value a cycle; its scores are read ahead and become weights, all heads at once."""
        p = self.params
        m.submodules.powers = table = Memory(
            shape=WEIGHT_BITS, depth=1 << TABLE_BITS, init=powers().tolist()
        )
        m.d.comb += get.addr.eq(Mux(s.value, s.taken + 1, s.taken))
        valid = [s.value]
        for _ in range(p.WEIGHING - 1):
            valid.append(delayed(m, valid[-1], 1))
        vector = delayed(m, self.v.p.x.as_value(), 4)
        scale = delayed(m, self.v.p.exponent, 3)
        for h, highest in enumerate(s.highest):
            # 1: how far below the highest; 2: its power; 3: the weight; 4: scaled; 5, 6: summed
            below = Signal(LOGIT_BITS + 1)
            m.d.sync += below.eq(highest - get.data[h])
            read = table.read_port()
            whole = delayed(m, below[TABLE_BITS:], 1)
            weight, scaled = Signal(WEIGHT_BITS), Signal(WEIGHT_BITS + MAX_EXPONENT)
            m.d.comb += read.addr.eq(below[:TABLE_BITS])
            rounding = Array([Const(0, 15), *(Const(1 << n, 15) for n in range(15))])
            few = whole[:4]
            m.d.sync += weight.eq(Mux(whole >= WEIGHT_BITS, 0, (read.data + rounding[few]) >> few))
            m.d.sync += scaled.eq(weight << scale)
            with m.If(valid[3]):
                m.d.sync += s.masses[h].eq(s.masses[h] + weight)
            with m.If(s.clear):
                m.d.sync += s.masses[h].eq(0)
            for n, at in enumerate(range(h * p.head_dim, (h + 1) * p.head_dim)):
                product = Signal(signed(WEIGHT_BITS + MAX_EXPONENT + 8))
                total, after = s.totals[at], (s.totals[at + p.lanes :] or [0])[0]
                m.d.sync += product.eq(scaled * vector.word_select(n, 8).as_signed())
                with m.If(valid[5]):
                    m.d.sync += total.eq(total + product)
                with m.If(s.move):  # towards the lowest
                    m.d.sync += total.eq(after)
                with m.If(s.clear):
                    m.d.sync += total.eq(0)

    def _sum_mass(self, m: Module, s: _Signals) -> None:
        """A head's sum of weights, brought to 16 bits, and its reciprocal."""
        mass, normal = Signal(s.mass_bits), Signal(WEIGHT_BITS)
        length = bit_length(m, mass)
        m.d.sync += mass.eq(Array(s.masses)[s.head])
        m.d.comb += [
            s.extra.eq(length - WEIGHT_BITS),
            normal.eq(mass >> s.extra),
            self._divide.i.p.numerator.eq(1 << 31),
            self._divide.i.p.divisor.eq(normal),
        ]

    def _send(self, m: Module, s: _Signals) -> None:
        """The totals move past, each times its head's reciprocal."""
        p, outbox = self.params, self._outbox
        m.d.comb += [outbox.start.eq(s.move), outbox.push.eq(delayed(m, s.move, p.OUT - 1))]
        dropped, factor = Signal(range(s.mass_bits)), Signal(Divide.BITS)
        m.d.comb += dropped.eq(Array(s.extras)[s.head])
        m.d.sync += factor.eq(Array(s.reciprocals)[s.head])
        for lane in range(p.lanes):
            shifted = Signal(signed(WIDE + WEIGHT_BITS))
            product = Signal(signed(WIDE + WEIGHT_BITS + Divide.BITS))
            result = Signal(signed(WIDE))
            m.d.sync += [
                shifted.eq(s.totals[lane] >> dropped),
                product.eq(shifted * factor),
                result.eq(saturated((product + (1 << 30)) >> 31, WIDE)),
            ]
            m.d.comb += outbox.payload[lane].eq(result)

    def _take_inputs(self, m: Module, s: _Signals) -> None:
        """States: a job, its queries, all keys, all values."""
        p, wait = self.params, Signal(range(self.params.WEIGHING + 1))
        with m.State("JOB"):
            m.d.comb += [self.job.ready.eq(1), s.clear.eq(1)]
            m.d.sync += [s.head.eq(0), s.taken.eq(0), s.stored.eq(0), s.first.eq(1), wait.eq(0)]
            with m.If(self.job.valid):
                m.d.sync += [
                    s.entries.eq(self.job.p.entries),
                    s.exponent.eq(self.job.p.exponent),
                ]
                m.next = "QUERIES"
        with m.State("QUERIES"):
            m.d.comb += self.q.ready.eq(1)
            with m.If(self.q.valid):
                # head by head from the top, so that the first ends up lowest
                kept = s.queries.as_value()[8 * p.head_dim :]
                m.d.sync += [
                    s.queries.as_value().eq(Cat(kept, self.q.payload.as_value())),
                    s.head.eq(s.head + 1),
                ]
                with m.If(s.head == p.group - 1):
                    m.d.sync += s.head.eq(0)
                    m.next = "KEYS"
        with m.State("KEYS"):
            m.d.comb += s.scoring.eq(1)
            with m.If(s.stored == s.entries):
                m.d.sync += s.taken.eq(0)
                m.next = "AHEAD"
        with m.State("AHEAD"):
            m.next = "VALUES"
        with m.State("VALUES"):
            m.d.comb += s.weighing.eq(1)
            with m.If(s.taken == s.entries):
                m.d.sync += wait.eq(wait + 1)
                with m.If(wait == p.WEIGHING - 2):
                    m.next = "MASS"

    def _finish(self, m: Module, s: _Signals) -> None:
        """States: a reciprocal for every head, one after another; then the result."""
        p, divide = self.params, self._divide
        with m.State("MASS"):
            m.next = "DIVIDE"
        with m.State("DIVIDE"):
            m.d.comb += divide.i.valid.eq(1)
            with m.If(divide.i.ready):
                m.d.sync += Array(s.extras)[s.head].eq(s.extra)
                m.next = "QUOTIENT"
        with m.State("QUOTIENT"):
            m.d.comb += divide.o.ready.eq(1)
            with m.If(divide.o.valid):
                m.d.sync += [Array(s.reciprocals)[s.head].eq(divide.o.payload), s.beat.eq(0)]
                with m.If(s.head == p.group - 1):
                    m.d.sync += s.head.eq(0)
                    m.next = "OUT"
                with m.Else():
                    m.d.sync += s.head.eq(s.head + 1)
                    m.next = "MASS"

        with m.State("OUT"):
            m.d.comb += s.move.eq(self._outbox.room)
            with m.If(s.move):
                m.d.sync += s.beat.eq(s.beat + 1)
                with m.If(s.beat == p.head_dim // p.lanes - 1):
                    m.d.sync += [s.beat.eq(0), s.head.eq(s.head + 1)]
                    with m.If(s.head == p.group - 1):
                        m.next = "DONE"
        with m.State("DONE"):
            # the factor of the last beats must stay
            m.next = "JOB"
