"""Division and square root, a bit a cycle: for what a token needs once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from amaranth.hdl import Cat, Module, Mux, Signal, ValueLike
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from tachyscope_fpga.parts.fixed import check_range


class SerialUnit(wiring.Component):
    """Takes operands, works on them for `bits` cycles, shows the result until it is taken."""

    bits: ClassVar[int]

    def steps(self, m: Module) -> tuple[list[ValueLike], list[ValueLike]]:
        """What the registers take with new operands, and what in every cycle of work."""
        raise NotImplementedError

    def elaborate(self, platform: object) -> Module:
        m = Module()
        load, work = self.steps(m)
        left = Signal(range(self.bits))
        with m.FSM():
            with m.State("IDLE"):
                m.d.comb += self.i.ready.eq(1)
                with m.If(self.i.valid):
                    m.d.sync += [*load, left.eq(self.bits - 1)]
                    m.next = "RUN"
            with m.State("RUN"):
                m.d.sync += [*work, left.eq(left - 1)]
                with m.If(left == 0):
                    m.next = "DONE"
            with m.State("DONE"):
                m.d.comb += self.o.valid.eq(1)
                with m.If(self.o.ready):
                    m.next = "IDLE"
        return m


@dataclass(frozen=True)
class Divide:
    """numerator // divisor of 32 by 16 bits, where the quotient has 17 bits or less."""

    BITS: ClassVar[int] = 17

    def compute(self, numerator: int, divisor: int) -> int:
        check_range("numerator", numerator, 0, 2**32 - 1)
        check_range("divisor", divisor, 1, 2**16 - 1)
        check_range("quotient", numerator // divisor, 0, 2**self.BITS - 1)
        return numerator // divisor

    def cycles(self) -> int:
        return self.BITS + 2

    def create(self) -> DivideUnit:
        return DivideUnit()


class DivideUnit(SerialUnit):
    """A quotient can be taken 18 cycles after its operands were; one at a time.

    Members
    -------
    i : In(stream of {numerator: 32, divisor: 16})
    o : Out(stream of 17)
    """

    bits = Divide.BITS

    def __init__(self) -> None:
        operands = data.StructLayout({"numerator": 32, "divisor": 16})
        super().__init__(
            {"i": In(stream.Signature(operands)), "o": Out(stream.Signature(Divide.BITS))}
        )

    def steps(self, m: Module) -> tuple[list[ValueLike], list[ValueLike]]:
        rest, divisor, quotient = Signal(33), Signal(33), Signal(Divide.BITS)
        fits = rest >= divisor
        m.d.comb += self.o.payload.eq(quotient)
        load = [rest.eq(self.i.p.numerator), divisor.eq(self.i.p.divisor << (Divide.BITS - 1))]
        return load, [
            rest.eq(Mux(fits, rest - divisor, rest)),
            quotient.eq(Cat(fits, quotient)),
            divisor.eq(divisor >> 1),
        ]


@dataclass(frozen=True)
class Root:
    """The integer square root of 32 bits."""

    def compute(self, n: int) -> int:
        check_range("n", n, 0, 2**32 - 1)
        return math.isqrt(n)

    def cycles(self) -> int:
        return 18

    def create(self) -> RootUnit:
        return RootUnit()


class RootUnit(SerialUnit):
    """A root can be taken 17 cycles after its square was; one at a time.

    Members
    -------
    i : In(stream of 32)
    o : Out(stream of 16)
    """

    bits = 16

    def __init__(self) -> None:
        super().__init__({"i": In(stream.Signature(32)), "o": Out(stream.Signature(16))})

    def steps(self, m: Module) -> tuple[list[ValueLike], list[ValueLike]]:
        square, rest, root = Signal(32), Signal(18), Signal(16)
        more, trial = Signal(20), Signal(18)
        fits = more >= trial
        m.d.comb += [
            self.o.payload.eq(root),
            more.eq(Cat(square[30:], rest)),
            trial.eq(Cat(1, 0, root)),
        ]
        return [square.eq(self.i.payload), rest.eq(0), root.eq(0)], [
            rest.eq(Mux(fits, more - trial, more)),
            root.eq(Cat(fits, root)),
            square.eq(square << 2),
        ]
