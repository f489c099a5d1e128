"""SwiGLU's middle: silu(gate) * up, from a table of sigmoids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from amaranth.hdl import Module, Mux, Signal, signed, unsigned
from amaranth.lib import stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from tachyscope_fpga.parts.fixed import (
    Ints,
    check_multiple,
    check_range,
    round_shift,
    saturate,
    saturated,
)
from tachyscope_fpga.parts.pipe import Outbox, delayed
from tachyscope_fpga.parts.vector import FRACTION, WIDE, wide_vector

TABLE_BITS = 10  # sigmoids of 0 to 8
STEP_BITS = 7  # 128 of them a unit
UNIT_BITS = 15


def sigmoids() -> Ints:
    """sigmoid((i + 1/2) / 128), i from 0 to 1022, in 2**-15; then 1, for all from 8 on."""
    x = (np.arange(1 << TABLE_BITS) + 0.5) / (1 << STEP_BITS)
    x[-1] = np.inf
    return np.floor((1 << UNIT_BITS) / (1 + np.exp(-x)) + 0.5).astype(np.int64)


@dataclass(frozen=True)
class SiluMul:
    """y = gate * sigmoid(gate) * up, on `lanes` wide numbers a beat: gate, up, gate, up, ...

    sigmoid is looked up for |gate| (it is 1 from 8 on); for gates below 0 it is 1 less that.
    Both products are rounded half up and saturated to wide numbers.
    """

    lanes: int = 4

    LATENCY: ClassVar[int] = 8

    def __post_init__(self) -> None:
        check_range("SiluMul lanes", self.lanes, 2, 64)
        check_multiple("SiluMul lanes", self.lanes, "a pair", 2)

    def compute(self, gate_up: Ints) -> Ints:
        """[..., 2 N] wide, gate and up in turn -> [..., N] wide."""
        gate, up = gate_up[..., 0::2], gate_up[..., 1::2]
        low = gate < 0
        # -gate - 1 for gate: what inverting its bits gives
        index = np.minimum((gate ^ -low.astype(np.int64)) >> (FRACTION - STEP_BITS), 1023)
        table = sigmoids()[index]
        sigmoid = np.where(low, (1 << UNIT_BITS) - table, table)
        silu = round_shift(gate * sigmoid, UNIT_BITS)
        return saturate(round_shift(silu * up, FRACTION), WIDE)

    def cycles(self, inner: int) -> int:
        return 2 * inner // self.lanes + self.LATENCY

    def create(self) -> SiluMulUnit:
        return SiluMulUnit(self)


class SiluMulUnit(wiring.Component):
    """One beat a cycle; a beat can be taken LATENCY cycles after its gates and ups were.

    Members
    -------
    i : In(stream of `lanes` signed(24))
        gate, up, gate, up, ...
    o : Out(stream of `lanes / 2` signed(24))
    """

    def __init__(self, params: SiluMul) -> None:
        self.params = params
        super().__init__(
            {
                "i": In(stream.Signature(wide_vector(params.lanes))),
                "o": Out(stream.Signature(wide_vector(params.lanes // 2))),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        p = self.params
        pairs = p.lanes // 2
        m.submodules.outbox = outbox = Outbox(wide_vector(pairs), depth=p.LATENCY + 1)
        wiring.connect(m, wiring.flipped(self.o), outbox.o)
        m.submodules.table = table = Memory(
            shape=unsigned(UNIT_BITS + 1), depth=1 << TABLE_BITS, init=sigmoids().tolist()
        )
        taken = self.i.valid & outbox.room
        m.d.comb += [
            self.i.ready.eq(outbox.room),
            outbox.start.eq(taken),
            outbox.push.eq(delayed(m, taken, p.LATENCY - 1)),
        ]
        top = (1 << TABLE_BITS) - 1
        for pair in range(pairs):
            gate, up = self.i.p[2 * pair], self.i.p[2 * pair + 1]
            read = table.read_port()
            # 1: the index of |gate|
            steps = Mux(gate[-1], ~gate, gate)[FRACTION - STEP_BITS : WIDE - 1]
            index = Signal(TABLE_BITS)
            m.d.sync += index.eq(Mux(steps[TABLE_BITS:].any(), top, steps))
            # 2: the table's sigmoid
            m.d.comb += read.addr.eq(index)
            low = delayed(m, gate[-1], 2)
            # 3, 4: silu
            sigmoid = Signal(UNIT_BITS + 1)
            product = Signal(signed(WIDE + UNIT_BITS + 2))
            silu = Signal(signed(WIDE))
            m.d.sync += sigmoid.eq(Mux(low, (1 << UNIT_BITS) - read.data, read.data))
            m.d.sync += product.eq(delayed(m, gate, 3) * sigmoid)
            # 5: rounded; 6: times up; 7: rounded, saturated
            m.d.sync += silu.eq((product + (1 << (UNIT_BITS - 1))) >> UNIT_BITS)
            both = Signal(signed(2 * WIDE))
            result = Signal(signed(WIDE))
            m.d.sync += both.eq(silu * delayed(m, up, 5))
            m.d.sync += result.eq(saturated((both + (1 << (FRACTION - 1))) >> FRACTION, WIDE))
            m.d.comb += outbox.payload[pair].eq(result)
        return m
