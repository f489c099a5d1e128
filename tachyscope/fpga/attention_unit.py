"""Attention of one token: scores against every entry, softmax by a table of 2**-x, values' mean."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from amaranth.hdl import Array, Cat, Const, Module, Mux, Signal, signed
from amaranth.lib import data, fifo, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from tachyscope.fpga.fixed import (
    ACC_BITS,
    Ints,
    ceil_log2,
    check_multiple,
    check_range,
    round_shift,
    saturate,
    saturated,
)
from tachyscope.fpga.gemv import GemvArray
from tachyscope.fpga.pipe import Outbox, delayed
from tachyscope.fpga.serial import Divide
from tachyscope.fpga.vector import FRACTION, MAX_EXPONENT, WIDE, bit_length, wide_vector

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
        self,
        q: Ints,
        q_exponent: int,
        k: Ints,
        k_exponents: Ints,
        v: Ints,
        v_exponents: Ints,
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
        group, size = p.group, p.head_dim
        m.submodules.array = array = p.array.create()
        m.submodules.outbox = outbox = Outbox(wide_vector(p.lanes), depth=p.OUT + 2)
        m.submodules.divide = divide = Divide().create()
        logits = data.ArrayLayout(signed(LOGIT_BITS), group)
        m.submodules.scores = scores = Memory(shape=logits, depth=p.context, init=[])
        m.submodules.powers = table = Memory(
            shape=WEIGHT_BITS, depth=1 << TABLE_BITS, init=powers().tolist()
        )
        put, get = scores.write_port(), scores.read_port()
        wiring.connect(m, wiring.flipped(self.o), outbox.o)

        entries = Signal(range(p.context + 1))
        exponent = Signal(range(MAX_EXPONENT + 1))
        queries = Signal(data.ArrayLayout(data.ArrayLayout(signed(8), size), group))
        head = Signal(range(group + 1))
        taken = Signal(range(p.context + 1))  # keys, then values
        stored = Signal(range(p.context + 1))
        scoring, weighing = Signal(), Signal()

        # scores: the dot products' exponents wait for them
        in_flight = array.params.latency + 3
        m.submodules.exponents = exponents = fifo.SyncFIFO(
            width=len(self.k.p.exponent), depth=in_flight
        )
        key = self.k.valid & self.k.ready
        m.d.comb += [
            self.k.ready.eq(scoring & (taken != entries) & array.i.ready & exponents.w_rdy),
            array.i.valid.eq(key),
            array.i.p.w.eq(queries),
            array.i.p.x.eq(self.k.p.x),
            array.i.p.last.eq(1),
            exponents.w_en.eq(key),
            exponents.w_data.eq(self.k.p.exponent),
            array.o.ready.eq(1),
            exponents.r_en.eq(array.o.valid),
        ]
        shift = Signal(range(p.shift + 1))
        both = exponent + exponents.r_data
        halves = Array([Const(0, p.shift), *(Const(1 << s, p.shift) for s in range(p.shift))])
        half = Signal(p.shift)
        m.d.sync += shift.eq(Mux(both > p.shift, 0, p.shift - both))
        m.d.sync += half.eq(halves[Mux(both > p.shift, 0, p.shift - both)])
        shift_later = delayed(m, shift, 1)
        scored = delayed(m, array.o.valid, 3)
        m.d.comb += [put.en.eq(scored), put.addr.eq(stored)]
        highest = [Signal(signed(LOGIT_BITS), name=f"highest{h}") for h in range(group)]
        first = Signal()
        for h in range(group):
            product = Signal(signed(ACC_BITS + 16))
            rounded = Signal(signed(ACC_BITS + 17))
            logit = Signal(signed(LOGIT_BITS))
            m.d.sync += [
                product.eq(array.o.p[h] * p.multiplier),
                rounded.eq(product + half),
                logit.eq(saturated(rounded >> shift_later, LOGIT_BITS)),
            ]
            m.d.comb += put.data[h].eq(logit)
            with m.If(scored & (first | (logit > highest[h]))):
                m.d.sync += highest[h].eq(logit)
        with m.If(scored):
            m.d.sync += [stored.eq(stored + 1), first.eq(0)]

        # weights: a value's scores are read ahead
        value = self.v.valid & self.v.ready
        m.d.comb += [
            self.v.ready.eq(weighing & (taken != entries)),
            get.addr.eq(Mux(value, taken + 1, taken)),
        ]
        with m.If(key | value):
            m.d.sync += taken.eq(taken + 1)
        valid = [value]
        for _ in range(p.WEIGHING - 1):
            valid.append(delayed(m, valid[-1], 1))
        vector = delayed(m, self.v.p.x.as_value(), 4)
        scale = delayed(m, self.v.p.exponent, 3)
        mass_bits = WEIGHT_BITS + ceil_log2(p.context)
        total_bits = mass_bits + MAX_EXPONENT + 8
        masses = [Signal(mass_bits, name=f"mass{h}") for h in range(group)]
        totals = [Signal(signed(total_bits), name=f"total{n}") for n in range(group * size)]
        clear, move = Signal(), Signal()
        for h in range(group):
            # 1: how far below the highest; 2: its power; 3: the weight; 4: scaled; 5, 6: summed
            below = Signal(LOGIT_BITS + 1)
            m.d.sync += below.eq(highest[h] - get.data[h])
            read = table.read_port()
            whole = delayed(m, below[TABLE_BITS:], 1)
            weight, scaled = Signal(WEIGHT_BITS), Signal(WEIGHT_BITS + MAX_EXPONENT)
            m.d.comb += read.addr.eq(below[:TABLE_BITS])
            rounding = Array([Const(0, 15), *(Const(1 << s, 15) for s in range(15))])
            few = whole[:4]
            m.d.sync += weight.eq(Mux(whole >= WEIGHT_BITS, 0, (read.data + rounding[few]) >> few))
            m.d.sync += scaled.eq(weight << scale)
            with m.If(valid[3]):
                m.d.sync += masses[h].eq(masses[h] + weight)
            for n in range(size):
                product = Signal(signed(WEIGHT_BITS + MAX_EXPONENT + 8))
                number = vector.word_select(n, 8).as_signed()
                m.d.sync += product.eq(scaled * number)
                at = h * size + n
                with m.If(valid[5]):
                    m.d.sync += totals[at].eq(totals[at] + product)
                with m.If(move):
                    after = at + p.lanes
                    m.d.sync += totals[at].eq(totals[after] if after < len(totals) else 0)
                with m.If(clear):
                    m.d.sync += totals[at].eq(0)
            with m.If(clear):
                m.d.sync += masses[h].eq(0)

        # a head's weights' sum, brought to 16 bits, and its reciprocal
        mass, normal = Signal(mass_bits), Signal(WEIGHT_BITS)
        extra = Signal(range(mass_bits))
        extras = [Signal(range(mass_bits), name=f"extra{h}") for h in range(group)]
        reciprocals = [Signal(Divide.BITS, name=f"reciprocal{h}") for h in range(group)]
        length = bit_length(m, mass)
        m.d.sync += mass.eq(Array(masses)[head])
        m.d.comb += [
            extra.eq(length - WEIGHT_BITS),
            normal.eq(mass >> extra),
            divide.i.p.numerator.eq(1 << 31),
            divide.i.p.divisor.eq(normal),
        ]

        # out: the totals move past
        beat = Signal(range(size // p.lanes))
        m.d.comb += [outbox.start.eq(move), outbox.push.eq(delayed(m, move, p.OUT - 1))]
        dropped, factor = Signal(range(mass_bits)), Signal(Divide.BITS)
        m.d.comb += dropped.eq(Array(extras)[head])
        m.d.sync += factor.eq(Array(reciprocals)[head])
        for lane in range(p.lanes):
            shifted = Signal(signed(WIDE + WEIGHT_BITS))
            product = Signal(signed(WIDE + WEIGHT_BITS + Divide.BITS))
            result = Signal(signed(WIDE))
            m.d.sync += [
                shifted.eq(totals[lane] >> dropped),
                product.eq(shifted * factor),
                result.eq(saturated((product + (1 << 30)) >> 31, WIDE)),
            ]
            m.d.comb += outbox.payload[lane].eq(result)

        wait = Signal(range(p.WEIGHING + 1))
        with m.FSM():
            with m.State("JOB"):
                m.d.comb += [self.job.ready.eq(1), clear.eq(1)]
                m.d.sync += [head.eq(0), taken.eq(0), stored.eq(0), first.eq(1), wait.eq(0)]
                with m.If(self.job.valid):
                    m.d.sync += [
                        entries.eq(self.job.p.entries),
                        exponent.eq(self.job.p.exponent),
                    ]
                    m.next = "QUERIES"
            with m.State("QUERIES"):
                m.d.comb += self.q.ready.eq(1)
                with m.If(self.q.valid):
                    m.d.sync += [
                        # head by head from the top, so that the first ends up lowest
                        queries.as_value().eq(
                            Cat(queries.as_value()[8 * size :], self.q.payload.as_value())
                        ),
                        head.eq(head + 1),
                    ]
                    with m.If(head == group - 1):
                        m.d.sync += head.eq(0)
                        m.next = "KEYS"
            with m.State("KEYS"):
                m.d.comb += scoring.eq(1)
                with m.If(stored == entries):
                    m.d.sync += taken.eq(0)
                    m.next = "AHEAD"
            with m.State("AHEAD"):
                m.next = "VALUES"
            with m.State("VALUES"):
                m.d.comb += weighing.eq(1)
                with m.If(taken == entries):
                    m.d.sync += wait.eq(wait + 1)
                    with m.If(wait == p.WEIGHING - 2):
                        m.next = "MASS"
            with m.State("MASS"):
                m.next = "DIVIDE"
            with m.State("DIVIDE"):
                m.d.comb += divide.i.valid.eq(1)
                with m.If(divide.i.ready):
                    m.d.sync += Array(extras)[head].eq(extra)
                    m.next = "QUOTIENT"
            with m.State("QUOTIENT"):
                m.d.comb += divide.o.ready.eq(1)
                with m.If(divide.o.valid):
                    m.d.sync += [Array(reciprocals)[head].eq(divide.o.payload), beat.eq(0)]
                    with m.If(head == group - 1):
                        m.d.sync += head.eq(0)
                        m.next = "OUT"
                    with m.Else():
                        m.d.sync += head.eq(head + 1)
                        m.next = "MASS"
            with m.State("OUT"):
                m.d.comb += move.eq(outbox.room)
                with m.If(move):
                    m.d.sync += beat.eq(beat + 1)
                    with m.If(beat == size // p.lanes - 1):
                        m.d.sync += [beat.eq(0), head.eq(head + 1)]
                        with m.If(head == group - 1):
                            m.next = "DONE"
            with m.State("DONE"):
                # the factor of the last beats must stay
                m.next = "JOB"
        return m
