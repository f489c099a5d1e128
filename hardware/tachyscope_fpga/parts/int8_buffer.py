"""A wide vector on its way into an array: held, scaled to int8 by its own largest, read again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from amaranth.hdl import Array, Const, Module, Mux, Signal, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from tachyscope_fpga.parts.fixed import Ints, check_multiple, check_range, saturated
from tachyscope_fpga.parts.pipe import Outbox, delayed
from tachyscope_fpga.parts.vector import MAX_EXPONENT, WIDE, bit_length, to_int8, wide_vector


@dataclass(frozen=True)
class Int8Buffer:
    """Vectors of up to `depth` wide numbers: in by `lanes` a beat, out as int8 by `macs` a beat.

    A vector's exponent is the least that its largest magnitude allows. It is read as often as its
    job says: once for every tile of a matrix.
    """

    depth: int
    lanes: int = 4
    macs: int = 16

    LATENCY: ClassVar[int] = 5  # cycles between the last beat in and the first out
    PIPELINE: ClassVar[int] = 3

    def __post_init__(self) -> None:
        check_range("Int8Buffer lanes", self.lanes, 1, 64)
        check_range("Int8Buffer macs", self.macs, 1, 256)
        check_range("Int8Buffer depth", self.depth, self.macs, 65536)
        check_multiple("Int8Buffer macs", self.macs, "lanes", self.lanes)
        check_multiple("Int8Buffer depth", self.depth, "macs", self.macs)

    @property
    def words(self) -> int:
        return self.depth // self.macs

    def compute(self, x: Ints) -> tuple[Ints, int]:
        """x [K] wide -> int8 [K] and the exponent."""
        code, exponent = to_int8(x)
        return code, int(exponent)

    def cycles(self, depth: int, times: int) -> int:
        """From the first beat in to the last out."""
        return depth // self.lanes + self.LATENCY + times * (depth // self.macs)

    def create(self) -> Int8BufferUnit:
        return Int8BufferUnit(self)


class Int8BufferUnit(wiring.Component):
    """One beat a cycle in, LATENCY cycles, one beat a cycle out.

    Members
    -------
    job : In(stream of {words, times})
        A vector of `words` * macs numbers is coming, to be read `times` times. The next job is
        taken when all of it is on its way out.
    i : In(stream of `lanes` signed(24))
    o : Out(stream of {x: `macs` signed(8), exponent, last})
        `last` marks the end of each reading.
    """

    def __init__(self, params: Int8Buffer) -> None:
        self.params = params
        job = data.StructLayout({"words": range(params.words + 1), "times": 16})
        self.beat = data.StructLayout(
            {
                "x": data.ArrayLayout(signed(8), params.macs),
                "exponent": range(MAX_EXPONENT + 1),
                "last": 1,
            }
        )
        super().__init__(
            {
                "job": In(stream.Signature(job)),
                "i": In(stream.Signature(wide_vector(params.lanes))),
                "o": Out(stream.Signature(self.beat)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        p = self.params
        parts = p.macs // p.lanes
        m.submodules.store = store = Memory(shape=wide_vector(p.macs), depth=p.words, init=[])
        write, read = store.write_port(granularity=p.lanes), store.read_port()
        m.submodules.outbox = outbox = Outbox(self.beat, depth=p.PIPELINE + 2)
        wiring.connect(m, wiring.flipped(self.o), outbox.o)

        words, times = Signal(range(p.words + 1)), Signal(16)
        word, part = Signal(range(p.words)), Signal(range(parts))
        last_word = word == words - 1
        # the bits in use by any magnitude
        used = Signal(WIDE - 1)
        magnitudes = [Mux(x[-1], ~x, x)[: WIDE - 1] for x in self.i.p]
        every = magnitudes[0]
        for magnitude in magnitudes[1:]:
            every = every | magnitude
        taken = self.i.valid & self.i.ready
        length = bit_length(m, used)
        exponent = Signal(range(MAX_EXPONENT + 1))

        m.d.comb += [
            write.addr.eq(word),
            write.en.eq(Mux(taken, 1 << part, 0)),
            *(write.data[n].eq(self.i.p[n % p.lanes]) for n in range(p.macs)),
            read.addr.eq(word),
        ]
        asked = Signal()
        m.d.comb += outbox.start.eq(asked)
        m.d.comb += outbox.push.eq(delayed(m, asked, p.PIPELINE))
        half = Signal(MAX_EXPONENT)
        halves = Array([Const(0), *(Const(1 << s) for s in range(MAX_EXPONENT))])
        m.d.sync += half.eq(halves[exponent])
        for n in range(p.macs):
            rounded, result = Signal(signed(WIDE + 1)), Signal(signed(8))
            m.d.sync += [
                rounded.eq((read.data[n] + half) >> exponent),
                result.eq(saturated(rounded)),
            ]
            m.d.comb += outbox.payload.x[n].eq(result)
        m.d.comb += [
            outbox.payload.exponent.eq(exponent),
            outbox.payload.last.eq(delayed(m, asked & last_word, p.PIPELINE)),
        ]

        with m.FSM():
            with m.State("JOB"):
                m.d.comb += self.job.ready.eq(1)
                with m.If(self.job.valid):
                    m.d.sync += [
                        words.eq(self.job.p.words),
                        times.eq(self.job.p.times),
                        word.eq(0),
                        part.eq(0),
                        used.eq(0),
                    ]
                    m.next = "IN"
            with m.State("IN"):
                m.d.comb += self.i.ready.eq(1)
                with m.If(taken):
                    m.d.sync += [used.eq(used | every), part.eq(part + 1)]
                    with m.If(part == parts - 1):
                        m.d.sync += [part.eq(0), word.eq(Mux(last_word, 0, word + 1))]
                        with m.If(last_word):
                            m.next = "SCALE"
            with m.State("SCALE"):
                # not before: beats of the last vector may still be in the pipeline
                m.d.sync += exponent.eq(Mux(length > 7, length - 7, 0))
                m.next = "OUT"
            with m.State("OUT"):
                m.d.comb += asked.eq(outbox.room)
                with m.If(asked):
                    m.d.sync += word.eq(Mux(last_word, 0, word + 1))
                    with m.If(last_word):
                        m.d.sync += times.eq(times - 1)
                        with m.If(times == 1):
                            m.next = "JOB"
        return m
