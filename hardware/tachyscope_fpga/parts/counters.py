"""Performance counters: how many cycles, beats and tokens, by what they were for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from tachyscope_fpga.errors import TachyscopeError
from tachyscope_fpga.parts.csr import BITS, Register


@dataclass(frozen=True)
class Counters:
    """A counter of 32 bits for every named event, that stops at its largest value."""

    events: tuple[tuple[str, str], ...]  # name, what is counted

    def __post_init__(self) -> None:
        names = [name for name, _ in self.events]
        if not names or len(set(names)) != len(names):
            raise TachyscopeError(f"counters need names of their own, got {names}")

    def registers(self) -> tuple[Register, ...]:
        """Their part of the register table."""
        return tuple(Register(f"COUNT_{name}", "ro", about) for name, about in self.events)

    def compute(self, cycles: Iterable[Sequence[int]]) -> list[int]:
        """The counts after cycles in which the events' bits were these."""
        counts = [0] * len(self.events)
        for bits in cycles:
            counts = [min(n + b, 2**BITS - 1) for n, b in zip(counts, bits, strict=True)]
        return counts

    def create(self) -> CountersUnit:
        return CountersUnit(self)


class CountersUnit(wiring.Component):
    """A count is one more in the cycle after its event.

    Members
    -------
    event : In(one bit an event)
    clear : In(1)
        All counts are 0 in the next cycle.
    counts : Out(32 bits an event)
    """

    def __init__(self, params: Counters) -> None:
        self.params = params
        count = len(params.events)
        super().__init__(
            {"event": In(count), "clear": In(1), "counts": Out(data.ArrayLayout(BITS, count))}
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        for number in range(len(self.params.events)):
            count = Signal(BITS)
            m.d.comb += self.counts[number].eq(count)
            more = self.event[number] & ~count.all()
            m.d.sync += count.eq(Mux(self.clear, 0, count + more))
        return m
