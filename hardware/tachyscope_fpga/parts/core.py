"""One core: an array and a requantiser that run jobs, a row or a tile of a row at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from amaranth.hdl import Cat, Module, Signal, Value, signed
from amaranth.lib import data, fifo, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from numpy.typing import ArrayLike

from tachyscope_fpga.parts.fixed import Ints, check_range, index
from tachyscope_fpga.parts.gemv import GemvArray
from tachyscope_fpga.parts.requant import Requant


@dataclass(frozen=True)
class Core:
    """Weights [outputs, depth] times one of `rows` activation vectors [depth], requantised.

    The vectors are kept in the core; weights stream through it once a tile and are not kept.
    """

    array: GemvArray = field(default_factory=GemvArray)
    depth: int = 64
    outputs: int = 64
    rows: int = 1
    tiles_per_job: int = 1

    def __post_init__(self) -> None:
        check_range("Core rows", self.rows, 1, 32)
        check_range("Core tiles_per_job", self.tiles_per_job, 1, self.tiles)
        check_range("Core beats", self.beats, 1, 2**14)

    @property
    def beats(self) -> int:
        """Beats of one tile."""
        return self.array.beats(self.depth)

    @property
    def tiles(self) -> int:
        """Tiles of one row."""
        return self.array.tiles(self.outputs)

    @property
    def requant(self) -> Requant:
        return Requant(self.array.lanes)

    @property
    def job_cycles(self) -> int:
        """Cycles for which a job holds the array."""
        return self.beats * self.tiles_per_job

    @property
    def latency(self) -> int:
        """Cycles from a tile's last beat of weights to its result: memory, array, requantiser."""
        return 1 + self.array.latency + Requant.LATENCY

    def compute(
        self, weights: ArrayLike, x: ArrayLike, multiplier: ArrayLike, shift: ArrayLike
    ) -> Ints:
        """int8 [outputs]."""
        return self.requant.compute(self.array.compute(weights, x), multiplier, shift)

    def cycles(self, jobs: int) -> int:
        """One beat a cycle, job after job, then the latency."""
        return jobs * self.job_cycles + self.latency

    def pack_weights(self, weights: ArrayLike) -> list[list[list[object]]]:
        """Beats [lanes][macs] by tile: [tiles][beats]."""
        w = np.asarray(weights).reshape(self.tiles, self.array.lanes, self.beats, self.array.macs)
        return w.transpose(0, 2, 1, 3).tolist()

    def job_layout(self) -> data.StructLayout:
        return data.StructLayout({"row": index(self.rows), "tile": index(self.tiles)})

    def result_layout(self) -> data.StructLayout:
        return data.StructLayout(
            {
                "row": index(self.rows),
                "tile": index(self.tiles),
                "y": data.ArrayLayout(signed(8), self.array.lanes),
            }
        )

    def create(self) -> CoreUnit:
        return CoreUnit(self)


class CoreUnit(wiring.Component):
    """One beat of weights a cycle, without a gap between jobs.

    Members
    -------
    x : In(stream of {row, beat, x: macs signed(8)})
        Activations; always ready. A row must not be written while a job of it runs.
    job : In(stream of {row, tile})
        Runs `tiles_per_job` tiles from `tile` on; taken with their last beat of weights.
    weights : In(stream of lanes x macs signed(8))
        `beats` beats a tile.
    scale : In(stream of the requantiser's multipliers and shifts)
        One beat a tile.
    o : Out(stream of {row, tile, y: lanes signed(8)})
    """

    def __init__(self, params: Core) -> None:
        self.params = params
        array = params.array
        vector = data.ArrayLayout(signed(8), array.macs)
        x = data.StructLayout({"row": index(params.rows), "beat": index(params.beats), "x": vector})
        super().__init__(
            {
                "x": In(stream.Signature(x)),
                "job": In(stream.Signature(params.job_layout())),
                "weights": In(stream.Signature(data.ArrayLayout(vector, array.lanes))),
                "scale": In(stream.Signature(params.requant.scale_layout())),
                "o": Out(stream.Signature(params.result_layout())),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        core = self.params
        m.submodules.array = array = core.array.create()
        m.submodules.requant = requant = core.requant.create()
        m.submodules.vectors = vectors = Memory(
            shape=8 * core.array.macs, depth=core.rows * core.beats, init=[]
        )
        put, get = vectors.write_port(), vectors.read_port()
        m.d.comb += [
            self.x.ready.eq(1),
            put.en.eq(self.x.valid),
            put.addr.eq(self.x.p.row * core.beats + self.x.p.beat),
            put.data.eq(self.x.p.x),
        ]

        # weights wait one cycle for the activations that are read for them
        beat, part = Signal(index(core.beats)), Signal(index(core.tiles_per_job))
        held = Signal(
            data.ArrayLayout(data.ArrayLayout(signed(8), core.array.macs), core.array.lanes),
            reset_less=True,
        )
        full, ends = Signal(), Signal()
        room, taken = Signal(), Signal()
        last_beat, last_tile = beat == core.beats - 1, part == core.tiles_per_job - 1
        m.d.comb += [
            room.eq(~full | array.i.ready),
            taken.eq(self.job.valid & self.weights.valid & room),
            self.weights.ready.eq(self.job.valid & room),
            self.job.ready.eq(taken & last_beat & last_tile),
            get.en.eq(taken),
            get.addr.eq(self.job.p.row * core.beats + beat),
            array.i.valid.eq(full),
            array.i.p.w.eq(held),
            Value.cast(array.i.p.x).eq(get.data),
            array.i.p.last.eq(ends),
        ]
        with m.If(taken):
            m.d.sync += [full.eq(1), held.eq(self.weights.payload), ends.eq(last_beat)]
            m.d.sync += beat.eq(beat + 1)
            with m.If(last_beat):
                m.d.sync += [beat.eq(0), part.eq(part + 1)]
                with m.If(last_tile):
                    m.d.sync += part.eq(0)
        with m.Elif(array.i.ready):
            m.d.sync += full.eq(0)

        # the tags of all tiles between the last beat and the result, in order
        in_flight = 1 + core.array.latency + 2 + Requant.LATENCY + 2
        tag_width = len(self.job.p.as_value())
        m.submodules.tags = tags = fifo.SyncFIFO(width=tag_width, depth=in_flight)
        tile = Signal(index(core.tiles))
        m.d.comb += [
            tile.eq(self.job.p.tile + part),
            tags.w_data.eq(Cat(self.job.p.row, tile)),
            tags.w_en.eq(taken & last_beat),
            tags.r_en.eq(self.o.valid & self.o.ready),
        ]
        wiring.connect(m, array.o, requant.acc)
        wiring.connect(m, wiring.flipped(self.scale), requant.scale)
        m.d.comb += [
            self.o.valid.eq(requant.o.valid),
            requant.o.ready.eq(self.o.ready),
            self.o.p.eq(Cat(tags.r_data, requant.o.payload.as_value())),
        ]
        return m
