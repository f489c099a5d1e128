"""The end of a pipeline that cannot stop: a buffer, and credits that keep it from overflowing."""

from __future__ import annotations

from amaranth.hdl import Module, ShapeLike, Signal, Value, ValueLike
from amaranth.lib import fifo, stream, wiring
from amaranth.lib.wiring import In, Out

from tachyscope_fpga.parts.fixed import check_range


class Outbox(wiring.Component):
    """Holds up to `depth` beats that entered a pipeline of fixed latency and were not taken yet.

    The pipeline's registers run freely, with no enable that must reach all of them in one cycle;
    instead a beat enters only while `room` is high. A beat pushed in one cycle is on `o` in the
    next. With depth >= the pipeline's latency + 2, one beat a cycle goes through.

    Members
    -------
    start : In(1)
        A beat that will be pushed later enters the pipeline in this cycle.
    room : Out(1)
        Another beat may enter.
    push, payload : In
        The beat at the pipeline's end. There is always a place for it.
    o : Out(stream)
        The beats in order.
    """

    def __init__(self, shape: ShapeLike, depth: int) -> None:
        check_range("Outbox depth", depth, 1, 1024)
        self.depth = depth
        super().__init__(
            {
                "start": In(1),
                "room": Out(1),
                "push": In(1),
                "payload": In(shape),
                "o": Out(stream.Signature(shape)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        payload = Value.cast(self.payload)
        m.submodules.fifo = store = fifo.SyncFIFO(width=len(payload), depth=self.depth)
        held = Signal(range(self.depth + 1))  # beats in the pipeline and in the buffer
        taken = self.o.valid & self.o.ready
        m.d.sync += held.eq(held + self.start - taken)
        m.d.comb += [
            self.room.eq(held != self.depth),
            store.w_data.eq(payload),
            store.w_en.eq(self.push),
            Value.cast(self.o.payload).eq(store.r_data),
            self.o.valid.eq(store.r_rdy),
            store.r_en.eq(self.o.ready),
        ]
        return m


def delayed(m: Module, signal: ValueLike, cycles: int, reset_less: bool = False) -> Value:
    """`signal` some cycles later.

    Registers of data that a valid bit goes with are reset_less: routing a reset to all of them
    costs an ECP5 much of its clock.
    """
    for _ in range(cycles):
        later = Signal(Value.cast(signal).shape(), reset_less=reset_less)
        m.d.sync += later.eq(signal)
        signal = later
    return Value.cast(signal)


def send(m: Module, port: stream.Interface, when: ValueLike, **fields: ValueLike) -> Signal:
    """Send one beat on a port's stream after `when`, its fields as given; high while it waits."""
    waits = Signal()
    for name, value in fields.items():
        m.d.comb += (port.p[name] if name != "payload" else port.payload).eq(value)
    m.d.comb += port.valid.eq(waits)
    with m.If(when):
        m.d.sync += waits.eq(1)
    with m.Elif(port.ready):
        m.d.sync += waits.eq(0)
    return waits
