"""RMSNorm of a wide vector; its gain is folded into the weights that follow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from amaranth.hdl import Array, Const, Module, Mux, Signal, signed
from amaranth.lib import stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from tachyscope_fpga.parts.fixed import (
    Ints,
    ceil_log2,
    check_multiple,
    check_range,
    round_shift,
    saturate,
    saturated,
)
from tachyscope_fpga.parts.pipe import Outbox, delayed
from tachyscope_fpga.parts.serial import Divide, Root
from tachyscope_fpga.parts.vector import FRACTION, WIDE, bit_length, wide_vector


@dataclass(frozen=True)
class RmsNorm:
    """y = x / sqrt(mean(x**2) + eps) over `width` wide numbers, `lanes` of them a beat.

    With n = sum(x**2) + eps brought to 31 or 32 bits by an even shift 2k, s = isqrt(n) and
    q = sqrt(width) * 2**a // s, y is x * q shifted by what is left, rounded half up, saturated. q
    has 15 bits or more, so y is off by less than 2**-13 of itself and half a last bit.

    eps is what is added to the sum: that of the model times width * 2**(2 * FRACTION).
    """

    width: int
    lanes: int = 4
    eps: int = 1

    LATENCY: ClassVar[int] = 44  # cycles between the last beat in and the first out

    def __post_init__(self) -> None:
        check_range("RmsNorm width", self.width, 2, 16384)
        check_range("RmsNorm lanes", self.lanes, 1, 64)
        check_range("RmsNorm eps", self.eps, 1, 2**47 - 1)
        check_multiple("RmsNorm width", self.width, "lanes", self.lanes)

    @property
    def numerator(self) -> tuple[int, int]:
        """sqrt(width) * 2**a, from 2**30 to 2**31, and a."""
        a = 30 - (math.isqrt(self.width).bit_length() - 1)
        return math.isqrt(self.width << (2 * a)), a

    def compute(self, x: Ints) -> Ints:
        """x [..., width] wide -> y [..., width] wide."""
        total = np.square(x).sum(-1) + self.eps
        scales = [self.scale(int(n)) for n in np.ravel(total)]
        q, shift = (np.array(part, np.int64) for part in zip(*scales, strict=True))
        shape = (*total.shape, 1)
        return saturate(round_shift(x * q.reshape(shape), shift.reshape(shape)), WIDE)

    def scale(self, n: int) -> tuple[int, int]:
        """The multiplier q and the shift for a sum of squares n."""
        k = -((32 - n.bit_length()) // 2)
        s = math.isqrt(n >> (2 * k) if k > 0 else n << (-2 * k))
        numerator, a = self.numerator
        return numerator // s, max(a + k - FRACTION, 0)

    @property
    def beats(self) -> int:
        return self.width // self.lanes

    def cycles(self) -> int:
        """In, sum, root, quotient, out."""
        return 2 * self.beats + self.LATENCY

    def create(self) -> RmsNormUnit:
        return RmsNormUnit(self)


class RmsNormUnit(wiring.Component):
    """A vector in, one beat a cycle; LATENCY cycles; a vector out, one beat a cycle.

    Members
    -------
    i : In(stream of `lanes` signed(24))
        `width / lanes` beats. Ready until a vector is whole, and again when it is out.
    o : Out(stream of `lanes` signed(24))
    """

    def __init__(self, params: RmsNorm) -> None:
        self.params = params
        beat = wide_vector(params.lanes)
        super().__init__({"i": In(stream.Signature(beat)), "o": Out(stream.Signature(beat))})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        p = self.params
        beat = wide_vector(p.lanes)
        m.submodules.store = store = Memory(shape=beat, depth=p.beats, init=[])
        write, read = store.write_port(), store.read_port()
        m.submodules.root = root = Root().create()
        m.submodules.divide = divide = Divide().create()
        m.submodules.outbox = outbox = Outbox(beat, depth=6)
        wiring.connect(m, wiring.flipped(self.o), outbox.o)

        count = Signal(range(p.beats))
        last = count == p.beats - 1
        taken = self.i.valid & self.i.ready
        total = Signal(2 * WIDE + ceil_log2(p.width), init=p.eps)
        squares = [Signal(2 * WIDE, name=f"square{lane}") for lane in range(p.lanes)]
        m.d.sync += [s.eq(self.i.p[lane] * self.i.p[lane]) for lane, s in enumerate(squares)]
        with m.If(delayed(m, taken, 1)):
            m.d.sync += total.eq(total + sum(squares[1:], squares[0]))
        m.d.comb += [
            write.addr.eq(count),
            write.data.eq(self.i.payload),
            write.en.eq(taken),
        ]

        # k with an offset, so that it has no sign: total >> 2 k, or << -2 k, has 31 or 32 bits
        length = bit_length(m, total)
        halves = Signal(range(33))  # (length + 1) // 2 = k + 16
        normal = Signal(32)
        shift = Signal(range(40))
        numerator, a = p.numerator
        m.d.sync += halves.eq((length + 1) >> 1)
        m.d.comb += [
            divide.i.p.numerator.eq(numerator),
            divide.i.p.divisor.eq(root.o.payload),
            divide.i.valid.eq(root.o.valid),
            root.o.ready.eq(divide.i.ready),
        ]
        quotient = Signal(Divide.BITS)

        # out: read, multiply, round and shift, saturate
        asked = Signal()
        m.d.comb += [read.addr.eq(count), outbox.start.eq(asked)]
        m.d.comb += outbox.push.eq(delayed(m, asked, 4))
        halfway = Array([Const(0, 40), *(Const(1 << s, 40) for s in range(39))])
        half = Signal(40)
        m.d.sync += half.eq(halfway[shift])
        for lane in range(p.lanes):
            product = Signal(signed(WIDE + Divide.BITS + 1))
            rounded = Signal(signed(WIDE + Divide.BITS + 2))
            result = Signal(signed(WIDE))
            m.d.sync += [
                product.eq(read.data[lane] * quotient),
                rounded.eq((product + half) >> shift),
                result.eq(saturated(rounded, WIDE)),
            ]
            m.d.comb += outbox.payload[lane].eq(result)

        with m.FSM():
            with m.State("IN"):
                m.d.comb += self.i.ready.eq(1)
                with m.If(taken):
                    m.d.sync += count.eq(Mux(last, 0, count + 1))
                    with m.If(last):
                        m.next = "SUM"
            with m.State("SUM"):
                m.next = "LENGTH"
            with m.State("LENGTH"):
                m.next = "NORMAL"
            with m.State("NORMAL"):
                raised = total << 32
                m.d.sync += [
                    normal.eq(raised >> (halves << 1)),
                    shift.eq(Mux(halves > 16 + FRACTION - a, halves + (a - FRACTION - 16), 0)),
                ]
                m.next = "ROOT"
            with m.State("ROOT"):
                m.d.comb += [root.i.valid.eq(1), root.i.payload.eq(normal)]
                with m.If(root.i.ready):
                    m.next = "DIVIDE"
            with m.State("DIVIDE"):
                m.d.comb += divide.o.ready.eq(1)
                with m.If(divide.o.valid):
                    m.d.sync += [quotient.eq(divide.o.payload), total.eq(p.eps)]
                    m.next = "OUT"
            with m.State("OUT"):
                m.d.comb += asked.eq(outbox.room)
                with m.If(asked):
                    m.d.sync += count.eq(Mux(last, 0, count + 1))
                    with m.If(last):
                        m.next = "IN"
        return m
