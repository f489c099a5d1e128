"""From memory to a stream: weights and scales in one run, keys and values as a sink and a window.

A memory port is two streams: `request` (addresses, in beats) and `response` (one beat for every
request, in order, after any number of cycles). A write that was taken is seen by every request
taken later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from amaranth.hdl import Module, Mux, ShapeLike, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from tachyscope_fpga.parts.fixed import Ints, check_range
from tachyscope_fpga.parts.pipe import Outbox

ADDRESS_BITS = 32


def _ports(shape: ShapeLike, *fields: str) -> dict[str, wiring.Member]:
    """A job of these fields, a memory port, and what was read."""
    job = data.StructLayout(dict.fromkeys(fields, ADDRESS_BITS))
    return {
        "job": In(stream.Signature(job)),
        "request": Out(stream.Signature(ADDRESS_BITS)),
        "response": In(stream.Signature(shape)),
        "o": Out(stream.Signature(shape)),
    }


@dataclass(frozen=True)
class Streamer:
    """Reads runs of beats, with up to `depth` of them asked for and not yet taken.

    The weights' streamer: with depth >= the memory's latency + 2 it delivers a beat a cycle, and
    while nobody takes them it fetches `depth` beats ahead.
    """

    depth: int = 32

    AHEAD: ClassVar[int] = 2  # cycles besides the memory's own until a job's first beat

    def __post_init__(self) -> None:
        check_range("Streamer depth", self.depth, 2, 1024)

    def compute(self, address: int, count: int) -> Ints:
        """The addresses of a job."""
        return np.arange(address, address + count)

    def cycles(self, count: int, latency: int) -> int:
        """From the job to the last beat, with a memory that answers after `latency` cycles."""
        return self.AHEAD + latency + count

    def create(self, shape: ShapeLike) -> StreamerUnit:
        return StreamerUnit(self, shape)


class StreamerUnit(wiring.Component):
    """One request a cycle while there is room for its answer.

    Members
    -------
    job : In(stream of {address, count})
        Taken when the last request of the job before is out; a count of 0 reads nothing.
    request : Out(stream of address), response : In(stream of `shape`)
        The memory port; `response` is always ready.
    o : Out(stream of `shape`)
    """

    def __init__(self, params: Streamer, shape: ShapeLike) -> None:
        self.params, self.shape = params, shape
        super().__init__(_ports(shape, "address", "count"))

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.outbox = outbox = Outbox(self.shape, depth=self.params.depth)
        wiring.connect(m, wiring.flipped(self.o), outbox.o)
        address, left = Signal(ADDRESS_BITS), Signal(ADDRESS_BITS)
        asked = self.request.valid & self.request.ready
        # a request, once shown, stays: room can only grow while it waits
        m.d.comb += [
            self.request.valid.eq((left != 0) & outbox.room),
            self.request.payload.eq(address),
            outbox.start.eq(asked),
            self.response.ready.eq(1),
            outbox.push.eq(self.response.valid),
            Value.cast(outbox.payload).eq(Value.cast(self.response.payload)),
            self.job.ready.eq(left == 0),
        ]
        with m.If(asked):
            m.d.sync += [address.eq(address + 1), left.eq(left - 1)]
        with m.If(self.job.valid & self.job.ready):
            m.d.sync += [address.eq(self.job.p.address), left.eq(self.job.p.count)]
        return m


@dataclass(frozen=True)
class KvStreamer:
    """Reads a token's entries: all of them, or the first `sink` and the newest `window`."""

    streamer: Streamer = Streamer()

    def compute(self, entries: int, sink: int, window: int) -> Ints:
        """The indices that are read of so many entries, in order; window 0 reads all."""
        if not window or entries <= sink + window:
            return np.arange(entries)
        return np.concatenate([np.arange(sink), np.arange(entries - window, entries)])

    def cycles(self, entries: int, sink: int, window: int, latency: int) -> int:
        """From the job to the last beat, with a memory that answers after `latency` cycles."""
        return 1 + self.streamer.cycles(len(self.compute(entries, sink, window)), latency)

    def create(self, shape: ShapeLike) -> KvStreamerUnit:
        return KvStreamerUnit(self, shape)


class KvStreamerUnit(wiring.Component):
    """A job becomes one run or two; one cycle lies between them.

    Members
    -------
    job : In(stream of {address, entries, sink, window})
        `address` is that of entry 0.
    request, response, o
        As a Streamer's.
    """

    def __init__(self, params: KvStreamer, shape: ShapeLike) -> None:
        self.params, self.shape = params, shape
        super().__init__(_ports(shape, "address", "entries", "sink", "window"))

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.streamer = streamer = self.params.streamer.create(self.shape)
        wiring.connect(m, wiring.flipped(self.request), streamer.request)
        wiring.connect(m, wiring.flipped(self.response), streamer.response)
        wiring.connect(m, wiring.flipped(self.o), streamer.o)
        job, given = self.job.p, Signal(self.job.p.shape())
        runs, first = Signal(2), Signal()  # runs to come, and whether the next is the sink
        split = (job.window != 0) & (job.entries > job.sink + job.window)
        m.d.comb += [
            self.job.ready.eq(runs == 0),
            streamer.job.valid.eq(runs != 0),
            streamer.job.p.address.eq(
                given.address + Mux(runs == 2, 0, Mux(first, 0, given.entries - given.window))
            ),
            streamer.job.p.count.eq(
                Mux(runs == 2, given.sink, Mux(first, given.entries, given.window))
            ),
        ]
        with m.If(self.job.valid & self.job.ready):
            m.d.sync += [given.eq(job), runs.eq(Mux(split, 2, 1)), first.eq(~split)]
        with m.If(streamer.job.valid & streamer.job.ready):
            m.d.sync += runs.eq(runs - 1)
        return m
