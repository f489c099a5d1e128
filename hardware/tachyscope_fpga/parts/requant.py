"""The requantiser: int32 accumulators to int8 or wider, by a multiplier and a shift a channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from amaranth.hdl import Array, Const, Module, Signal, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from numpy.typing import ArrayLike

from tachyscope_fpga.parts.fixed import (
    ACC_BITS,
    ACC_HIGH,
    ACC_LOW,
    MAX_MULTIPLIER,
    MAX_SHIFT,
    Ints,
    check_range,
    ints,
    requantise,
    saturated,
)
from tachyscope_fpga.parts.pipe import Outbox, delayed

HALF = 16  # the accumulator is multiplied in two halves, one hardware multiplier each


@dataclass(frozen=True)
class Requant:
    """`lanes` channels at once: acc * multiplier / 2**shift, rounded half up, saturated to `bits`.

    The accumulator is never narrowed first: 32 bits times 15 bits and the rounding bit stay
    within 48, for every K up to 131,071 (``fixed.MAX_DEPTH``; Llama-7B's longest is 11,008).
    """

    lanes: int = 16
    bits: int = 8

    LATENCY: ClassVar[int] = 8

    def __post_init__(self) -> None:
        check_range("Requant lanes", self.lanes, 1, 256)
        check_range("Requant bits", self.bits, 2, ACC_BITS)

    def compute(self, acc: ArrayLike, multiplier: ArrayLike, shift: ArrayLike) -> Ints:
        return requantise(
            ints(acc, "acc", ACC_LOW, ACC_HIGH),
            ints(multiplier, "multiplier", 0, MAX_MULTIPLIER),
            ints(shift, "shift", 0, MAX_SHIFT),
            self.bits,
        )

    def cycles(self, tiles: int) -> int:
        """One tile of `lanes` channels a cycle."""
        return tiles + self.LATENCY

    def scale_layout(self) -> data.StructLayout:
        return data.StructLayout(
            {
                "multiplier": data.ArrayLayout(15, self.lanes),
                "shift": data.ArrayLayout(6, self.lanes),
            }
        )

    def create(self) -> RequantUnit:
        return RequantUnit(self)


class RequantUnit(wiring.Component):
    """One tile a cycle; a result can be taken LATENCY cycles after its accumulators were.

    Members
    -------
    acc : In(stream of `lanes` signed(32))
    scale : In(stream of {multiplier: `lanes` unsigned(15), shift: `lanes` unsigned(6)})
        One beat for each beat of `acc`; the two are taken together.
    o : Out(stream of `lanes` signed(bits))
    """

    def __init__(self, params: Requant) -> None:
        self.params = params
        super().__init__(
            {
                "acc": In(stream.Signature(data.ArrayLayout(signed(ACC_BITS), params.lanes))),
                "scale": In(stream.Signature(params.scale_layout())),
                "o": Out(stream.Signature(data.ArrayLayout(signed(params.bits), params.lanes))),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        out = data.ArrayLayout(signed(self.params.bits), self.params.lanes)
        m.submodules.outbox = outbox = Outbox(out, depth=self.params.LATENCY + 2)
        taken = self.acc.valid & self.scale.valid & outbox.room
        m.d.comb += [
            self.acc.ready.eq(self.scale.valid & outbox.room),
            self.scale.ready.eq(self.acc.valid & outbox.room),
            outbox.start.eq(taken),
            outbox.push.eq(delayed(m, taken, self.params.LATENCY - 1)),
        ]
        wiring.connect(m, wiring.flipped(self.o), outbox.o)
        rounding = Array([Const(0, 48), *(Const(1 << s, 48) for s in range(MAX_SHIFT))])
        for lane in range(self.params.lanes):
            acc = Signal(signed(ACC_BITS), reset_less=True)
            factor = Signal(signed(16), reset_less=True)
            shift = [Signal(6, name=f"shift{stage}", reset_less=True) for stage in range(4)]
            low = Signal(signed(2 * HALF + 1), reset_less=True)
            high = Signal(signed(2 * HALF), reset_less=True)
            half = Signal(48, reset_less=True)
            product, rounded, coarse, fine = (Signal(signed(48), reset_less=True) for _ in range(4))
            result = Signal(signed(self.params.bits), reset_less=True)
            m.d.sync += [
                # 1: registers in front of the multipliers
                acc.eq(self.acc.payload[lane]),
                factor.eq(self.scale.payload.multiplier[lane]),
                shift[0].eq(self.scale.payload.shift[lane]),
                # 2: two products
                low.eq(acc[:HALF] * factor),
                high.eq(acc[HALF:].as_signed() * factor),
                shift[1].eq(shift[0]),
                # 3: one product, and half of the last place
                product.eq((high << HALF) + low),
                half.eq(rounding[shift[1]]),
                shift[2].eq(shift[1]),
                # 4: rounded half up
                rounded.eq(product + half.as_signed()),
                shift[3].eq(shift[2]),
                # 5, 6: the shift in two steps
                coarse.eq(rounded >> (shift[3] & 0x38)),
                fine.eq(coarse >> delayed(m, shift[3][:3], 1, reset_less=True)),
                # 7: saturated
                result.eq(saturated(fine, self.params.bits)),
            ]
            m.d.comb += outbox.payload[lane].eq(result)
        return m
