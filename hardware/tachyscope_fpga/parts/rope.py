"""Rotary positions from a phase and a sine table: no table of positions, so no longest video."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from amaranth.hdl import Array, Const, Module, Mux, Signal, signed
from amaranth.lib import data, stream, wiring
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
from tachyscope_fpga.parts.vector import WIDE, wide_vector

PHASE_BITS = 32  # a turn is 2**32
TABLE_BITS = 12  # a turn has 4096 sines
UNIT = 1 << 14  # sine 1


def sines() -> Ints:
    """One turn's sines, 4096 of them."""
    turn = np.arange(1 << TABLE_BITS) * (2 * np.pi / (1 << TABLE_BITS))
    return np.floor(np.sin(turn) * UNIT + 0.5).astype(np.int64)


@dataclass(frozen=True)
class Rope:
    """Turns pairs (2i, 2i + 1) of a head's channels by position * steps[i].

    A step is what a pair turns a position, in 2**-32 of a turn. Checkpoints whose pairs are
    (i, i + half) have their projections' rows interleaved once, which no dot product notices.
    An angle is taken to the nearest of 4096; the result is rounded half up and saturated.
    """

    steps: tuple[int, ...]
    lanes: int = 4

    FILL: ClassVar[int] = 4
    LATENCY: ClassVar[int] = 4

    def __post_init__(self) -> None:
        check_range("Rope pairs", len(self.steps), 1, 256)
        for step in self.steps:
            check_range("Rope step", step, 0, 2**PHASE_BITS - 1)
        check_range("Rope lanes", self.lanes, 2, 64)
        check_multiple("Rope lanes", self.lanes, "a pair's channels", 2)
        check_multiple("Rope head size", 2 * len(self.steps), "lanes", self.lanes)

    @property
    def head_dim(self) -> int:
        return 2 * len(self.steps)

    @classmethod
    def of(cls, head_dim: int, theta: float, scale: float = 1.0, lanes: int = 4) -> Rope:
        """The steps of theta**(-2i / head_dim) / scale radians."""
        i = np.arange(head_dim // 2)
        turns = theta ** (-2.0 * i / head_dim) / scale / (2 * np.pi)
        steps = np.floor(turns * 2.0**PHASE_BITS + 0.5).astype(np.int64) % 2**PHASE_BITS
        return cls(tuple(steps.tolist()), lanes)

    def angles(self, position: int) -> tuple[Ints, Ints]:
        """cos and sin [head_dim / 2]."""
        half = 1 << (PHASE_BITS - TABLE_BITS - 1)
        phase = (np.array(self.steps, np.int64) * position + half) % 2**PHASE_BITS
        index = phase >> (PHASE_BITS - TABLE_BITS)
        table = sines()
        return table[(index + (1 << (TABLE_BITS - 2))) % (1 << TABLE_BITS)], table[index]

    def compute(self, x: Ints, position: int) -> Ints:
        """x [..., head_dim] wide, turned."""
        cos, sin = self.angles(position)
        a, b = x[..., 0::2], x[..., 1::2]
        turned = np.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)
        return saturate(round_shift(turned, 14), WIDE)

    @property
    def beats(self) -> int:
        """Beats of a head."""
        return self.head_dim // self.lanes

    def cycles(self, heads: int) -> int:
        """The table of a position, then a beat a cycle."""
        return self.FILL + len(self.steps) + heads * self.beats + self.LATENCY

    def create(self) -> RopeUnit:
        return RopeUnit(self)


class RopeUnit(wiring.Component):
    """A position fills a table of cosines and sines, one pair a cycle; then one beat a cycle.

    Beats are taken from FILL + head_dim / 2 cycles after the position on; a beat can be taken from
    the output LATENCY cycles after it went in.

    Members
    -------
    position : In(stream of 32)
        For all beats that are taken after it.
    i : In(stream of `lanes` signed(24))
        Heads, one after another.
    o : Out(stream of `lanes` signed(24))
    """

    def __init__(self, params: Rope) -> None:
        self.params = params
        beat = wide_vector(params.lanes)
        super().__init__(
            {
                "position": In(stream.Signature(PHASE_BITS)),
                "i": In(stream.Signature(beat)),
                "o": Out(stream.Signature(beat)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        p = self.params
        pairs, count = p.lanes // 2, len(p.steps)
        beat = wide_vector(p.lanes)
        m.submodules.outbox = outbox = Outbox(beat, depth=p.LATENCY + 1)
        wiring.connect(m, wiring.flipped(self.o), outbox.o)
        m.submodules.sine = sine = Memory(
            shape=signed(16), depth=1 << TABLE_BITS, init=sines().tolist()
        )
        for_cos, for_sin = sine.read_port(), sine.read_port()
        turn = data.StructLayout({"cos": signed(16), "sin": signed(16)})
        turns = data.ArrayLayout(turn, pairs)
        m.submodules.table = table = Memory(shape=turns, depth=p.beats, init=[])
        write, read = table.write_port(granularity=1), table.read_port()

        # fill: phase, index, sines, table
        position, pair = Signal(PHASE_BITS), Signal(range(count))
        steps = Array([Const(step, PHASE_BITS) for step in p.steps])
        phase = Signal(PHASE_BITS)
        filling = Signal()
        half = 1 << (PHASE_BITS - TABLE_BITS - 1)
        m.d.sync += phase.eq(position * steps[pair] + half)
        index = phase[PHASE_BITS - TABLE_BITS :]
        m.d.comb += [
            for_sin.addr.eq(index),
            for_cos.addr.eq(index + (1 << (TABLE_BITS - 2))),
        ]
        at = delayed(m, pair, 2)
        for spot in range(pairs):
            m.d.comb += [
                write.data[spot].cos.eq(for_cos.data),
                write.data[spot].sin.eq(for_sin.data),
            ]
        m.d.comb += [
            write.addr.eq(at // pairs),
            write.en.eq(Mux(delayed(m, filling, 2), 1 << (at % pairs), 0)),
        ]

        # a beat: its row of the table is read ahead
        row = Signal(range(p.beats))
        taken = self.i.valid & self.i.ready
        after = Mux(row == p.beats - 1, 0, row + 1)
        m.d.comb += [read.addr.eq(Mux(taken, after, row)), outbox.start.eq(taken)]
        m.d.comb += outbox.push.eq(delayed(m, taken, p.LATENCY - 1))
        with m.If(taken):
            m.d.sync += row.eq(after)
        for spot in range(pairs):
            a, b = self.i.p[2 * spot], self.i.p[2 * spot + 1]
            cos, sin = read.data[spot].cos, read.data[spot].sin
            products = [Signal(signed(WIDE + 16), name=f"product{spot}_{n}") for n in range(4)]
            sums = [Signal(signed(WIDE + 17), name=f"sum{spot}_{n}") for n in range(2)]
            results = [Signal(signed(WIDE), name=f"result{spot}_{n}") for n in range(2)]
            factors = ((a, cos), (b, sin), (b, cos), (a, sin))
            m.d.sync += [x.eq(f * g) for x, (f, g) in zip(products, factors, strict=True)]
            m.d.sync += [
                sums[0].eq(products[0] - products[1] + (UNIT >> 1)),
                sums[1].eq(products[2] + products[3] + (UNIT >> 1)),
                *(r.eq(saturated(s >> 14, WIDE)) for r, s in zip(results, sums, strict=True)),
            ]
            m.d.comb += [outbox.payload[2 * spot + n].eq(r) for n, r in enumerate(results)]

        wait = Signal(range(4))
        with m.FSM():
            with m.State("EMPTY"):
                m.d.comb += self.position.ready.eq(1)
                with m.If(self.position.valid):
                    m.d.sync += [position.eq(self.position.payload), pair.eq(0), row.eq(0)]
                    m.next = "FILL"
            with m.State("FILL"):
                m.d.comb += filling.eq(1)
                m.d.sync += [pair.eq(pair + 1), wait.eq(0)]
                with m.If(pair == count - 1):
                    m.next = "DRAIN"
            with m.State("DRAIN"):
                # two cycles until the last pair is in the table, one until its row is read
                m.d.sync += wait.eq(wait + 1)
                with m.If(wait == p.FILL - 2):
                    m.next = "READY"
            with m.State("READY"):
                m.d.comb += [
                    self.i.ready.eq(outbox.room & ~self.position.valid),
                    self.position.ready.eq(1),
                ]
                with m.If(self.position.valid):
                    m.d.sync += [position.eq(self.position.payload), pair.eq(0), row.eq(0)]
                    m.next = "FILL"
        return m
