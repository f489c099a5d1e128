"""The array: lanes x MACs of int8 multipliers that turn a stream of weights into dot products."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from amaranth.hdl import Module, Mux, Signal, Value, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from numpy.typing import ArrayLike

from tachyscope_fpga.errors import TachyscopeError
from tachyscope_fpga.parts.fixed import (
    ACC_BITS,
    MAX_DEPTH,
    Ints,
    ceil_log2,
    check_multiple,
    check_range,
    ints,
)
from tachyscope_fpga.parts.pipe import Outbox, delayed

SPLIT = 18  # where the second of two packed weights begins: a DSP48E2 multiplies 27 x 18 bits


@dataclass(frozen=True)
class GemvArray:
    """`lanes` dot products at once, `macs` products of each a cycle.

    A matrix [N, K] times a vector [K] is N / lanes tiles of K / macs beats. A beat holds the
    tile's weights [lanes, macs] and the vector's next `macs` numbers, which all lanes share; the
    beat marked `last` ends the dot products.

    Parameters
    ----------
    products_per_dsp : 1 or 2
        2 packs the weights of two lanes into one wide multiplier (27 x 18 bits: UltraScale+).
    """

    lanes: int = 16
    macs: int = 16
    products_per_dsp: int = 1

    def __post_init__(self) -> None:
        check_range("GemvArray lanes", self.lanes, 1, 256)
        check_range("GemvArray macs", self.macs, 1, 256)
        check_range("GemvArray products_per_dsp", self.products_per_dsp, 1, 2)
        if self.products_per_dsp == 2:
            check_multiple("GemvArray lanes", self.lanes, "products_per_dsp", 2)

    @property
    def latency(self) -> int:
        """Cycles from a tile's last beat to its accumulators."""
        return 6 + ceil_log2(self.macs) + (self.products_per_dsp == 2)

    def beats(self, depth: int) -> int:
        """Beats of one tile."""
        check_range("depth", depth, 1, MAX_DEPTH)
        check_multiple("depth", depth, "macs", self.macs)
        return depth // self.macs

    def tiles(self, outputs: int) -> int:
        check_range("outputs", outputs, 1, 2**20)
        check_multiple("outputs", outputs, "lanes", self.lanes)
        return outputs // self.lanes

    def compute(self, weights: ArrayLike, x: ArrayLike) -> Ints:
        """weights [N, K] times x [K]: exact, and within int32."""
        w, v = ints(weights, "weights"), ints(x, "x")
        if w.ndim != 2 or v.shape != w.shape[1:]:
            raise TachyscopeError(
                f"weights must be [N, K] and x [K], got {list(w.shape)} and {list(v.shape)}"
            )
        self.tiles(w.shape[0])
        self.beats(w.shape[1])
        return np.asarray(w @ v, np.int64)

    def cycles(self, depth: int, outputs: int) -> int:
        """One beat a cycle, then the pipeline's latency."""
        return self.beats(depth) * self.tiles(outputs) + self.latency

    def pack(self, weights: ArrayLike, x: ArrayLike) -> list[dict[str, object]]:
        """The beats of weights [N, K] times x [K], in order."""
        w, v = ints(weights, "weights"), ints(x, "x")
        tiles, beats = self.tiles(w.shape[0]), self.beats(w.shape[1])
        blocks = w.reshape(tiles, self.lanes, beats, self.macs).transpose(0, 2, 1, 3)
        parts = v.reshape(beats, self.macs).tolist()
        return [
            {"w": blocks[t, b].tolist(), "x": parts[b], "last": b == beats - 1}
            for t in range(tiles)
            for b in range(beats)
        ]

    def layout(self) -> data.StructLayout:
        vector = data.ArrayLayout(signed(8), self.macs)
        return data.StructLayout(
            {"w": data.ArrayLayout(vector, self.lanes), "x": vector, "last": 1}
        )

    def create(self) -> GemvArrayUnit:
        return GemvArrayUnit(self)


class GemvArrayUnit(wiring.Component):
    """One beat a cycle; a tile can be taken `latency` cycles after its last beat was.

    Members
    -------
    i : In(stream of {w: lanes x macs signed(8), x: macs signed(8), last: 1})
        Not ready while as many tiles as the output buffer holds wait to be taken.
    o : Out(stream of `lanes` signed(32))
    """

    def __init__(self, params: GemvArray) -> None:
        self.params = params
        super().__init__(
            {
                "i": In(stream.Signature(params.layout())),
                "o": Out(stream.Signature(data.ArrayLayout(signed(ACC_BITS), params.lanes))),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        array = self.params
        m.submodules.outbox = outbox = Outbox(
            data.ArrayLayout(signed(ACC_BITS), array.lanes), depth=array.latency + 2
        )
        wiring.connect(m, wiring.flipped(self.o), outbox.o)
        beat = self.i.valid & outbox.room
        m.d.comb += [self.i.ready.eq(outbox.room), outbox.start.eq(beat & self.i.p.last)]

        products = (_packed if array.products_per_dsp == 2 else _plain)(m, self.i.p, array)
        sums = [_tree(m, lane) for lane in products]
        # the sums of a beat are there latency - 2 cycles after it was taken
        valid = delayed(m, beat, array.latency - 2)
        last = delayed(m, beat & self.i.p.last, array.latency - 2)
        first = Signal(init=1)  # the next beat begins a tile
        with m.If(valid):
            m.d.sync += first.eq(last)
        m.d.sync += outbox.push.eq(last)
        for lane, total in enumerate(sums):
            acc = Signal(signed(ACC_BITS), reset_less=True)
            with m.If(valid):
                m.d.sync += acc.eq(Mux(first, 0, acc) + total)
            m.d.comb += outbox.payload[lane].eq(acc)
        return m


def _plain(m: Module, beat: data.View, array: GemvArray) -> list[list[Value]]:
    """One multiplier a product, two registers on both sides: 4 cycles.

    A multiplier block has these registers inside; where a tool does not use them, the outer ones
    let the inner ones lie beside the multiplier. The second register of a number that all lanes
    share is one of each lane, kept apart by ``synth.py``: one would lie far from most multipliers.
    """
    shared = [delayed(m, beat.x[k], 1, reset_less=True) for k in range(array.macs)]
    lanes = []
    for lane in range(array.lanes):
        x = [
            Signal(signed(8), name=f"x{lane}_{k}", reset_less=True, attrs={"keep": 1})
            for k in range(array.macs)
        ]
        m.d.sync += [own.eq(number) for own, number in zip(x, shared, strict=True)]
        weights = [delayed(m, beat.w[lane][k], 2, reset_less=True) for k in range(array.macs)]
        lanes.append(
            [delayed(m, w * part, 2, reset_less=True) for w, part in zip(weights, x, strict=True)]
        )
    return lanes


def _packed(m: Module, beat: data.View, array: GemvArray) -> list[list[Value]]:
    """One multiplier for the weights of two lanes and the number they share: 5 cycles.

    (odd * 2**18 + even) * x holds even * x in its low 18 bits; what is above is odd * x, less one
    where even * x is negative.
    """
    x = [delayed(m, beat.x[k], 2, reset_less=True) for k in range(array.macs)]
    lanes: list[list[Value]] = []
    for lane in range(0, array.lanes, 2):
        rows: list[list[Value]] = [[], []]
        for k in range(array.macs):
            low, high = (delayed(m, beat.w[row][k], 1, reset_less=True) for row in (lane, lane + 1))
            pair = Signal(signed(27), name=f"w{lane}_{k}", reset_less=True)
            even = Signal(signed(16), name=f"p{lane}_{k}", reset_less=True)
            odd = Signal(signed(16), name=f"p{lane + 1}_{k}", reset_less=True)
            m.d.sync += pair.eq((high << SPLIT) + low)
            both = delayed(m, pair * x[k], 2, reset_less=True)
            m.d.sync += [
                even.eq(both[:16].as_signed()),
                odd.eq(both[SPLIT:].as_signed() + both[SPLIT - 1]),
            ]
            rows[0].append(even)
            rows[1].append(odd)
        lanes += rows
    return lanes


def _tree(m: Module, terms: list[Value]) -> Value:
    """The sum, in ceil(log2(terms)) cycles."""
    while len(terms) > 1:
        sums: list[Value] = []
        for k in range(0, len(terms), 2):
            pair = terms[k : k + 2]
            total = Signal(signed(len(pair[0]) + 1), reset_less=True)
            m.d.sync += total.eq(sum(pair[1:], pair[0]))
            sums.append(total)
        terms = sums
    return terms[0]
