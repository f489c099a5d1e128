"""Neuron replay: every token computes a fixed slice of the MLP and adds what the slice changed.

The neurons that change most from frame to frame are computed, the others' part of the output comes
from the same place one frame back, moved by a linear map of the input's change. Both products are
one matrix [outputs, neurons + inputs] times one vector of differences, so the array and the
requantiser do them; here is the rest: the differences, and the sum with the cached output. The
slice is fixed: there is no gate, no valid bit to ask and nothing to schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

from amaranth.hdl import Module, Signal, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from numpy.typing import ArrayLike

from tachyscope_fpga.parts.fixed import Ints, check_range, ints, saturate, saturated


@dataclass(frozen=True)
class SaturatedSum:
    """`lanes` int8 sums, or differences, a beat; what does not fit is clipped."""

    lanes: int = 16
    subtract: bool = False

    def __post_init__(self) -> None:
        check_range("SaturatedSum lanes", self.lanes, 1, 256)

    def compute(self, a: ArrayLike, b: ArrayLike) -> Ints:
        """a + b, or a - b: the cached output and its change, or a vector now and a frame ago."""
        first, second = ints(a, "a"), ints(b, "b")
        return saturate(first - second if self.subtract else first + second)

    def cycles(self, beats: int) -> int:
        """One beat a cycle, one cycle later."""
        return beats + 1

    def create(self) -> SaturatedSumUnit:
        return SaturatedSumUnit(self)


class SaturatedSumUnit(wiring.Component):
    """One beat a cycle; it can be taken in the next.

    Members
    -------
    a, b : In(stream of `lanes` signed(8))
        Taken together.
    o : Out(stream of `lanes` signed(8))
    """

    def __init__(self, params: SaturatedSum) -> None:
        self.params = params
        beat = stream.Signature(data.ArrayLayout(signed(8), params.lanes))
        super().__init__({"a": In(beat), "b": In(beat), "o": Out(beat)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        full, free = Signal(), Signal()
        both = self.a.valid & self.b.valid
        m.d.comb += [
            free.eq(~full | self.o.ready),
            self.a.ready.eq(self.b.valid & free),
            self.b.ready.eq(self.a.valid & free),
            self.o.valid.eq(full),
        ]
        with m.If(free):
            m.d.sync += full.eq(both)
            for lane in range(self.params.lanes):
                a, b = self.a.payload[lane], self.b.payload[lane]
                total = Signal(signed(9), name=f"total{lane}")
                m.d.comb += total.eq(a - b if self.params.subtract else a + b)
                m.d.sync += self.o.payload[lane].eq(saturated(total))
        return m
