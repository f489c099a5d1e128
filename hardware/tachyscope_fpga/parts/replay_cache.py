"""The replay cache: the MLP output of every place of the last frame, and whether there is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from amaranth.hdl import Module, Mux, Signal, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from tachyscope_fpga.parts.fixed import check_range, index, ints
from tachyscope_fpga.parts.pipe import Outbox, delayed


@dataclass(frozen=True)
class ReplayCache:
    """`entries` outputs of `tiles` beats of `lanes` int8 numbers, each entry with a valid bit.

    An entry is a place of the frame (of one row and layer, where there are several). Writing any
    of its tiles makes it invalid, and `seal` makes it valid: half an output is never replayed.
    `clear` empties the cache for the next video. A read's tag (0 to tags - 1) comes back with its
    tiles.
    """

    entries: int = 256
    tiles: int = 4
    lanes: int = 16
    tags: int = 1

    def __post_init__(self) -> None:
        check_range("ReplayCache entries", self.entries, 1, 2**20)
        check_range("ReplayCache tiles", self.tiles, 1, 2**14)
        check_range("ReplayCache lanes", self.lanes, 1, 256)
        check_range("ReplayCache tags", self.tags, 1, 2**16)

    @property
    def bytes(self) -> int:
        return self.entries * self.tiles * self.lanes

    def compute(self, operations: Sequence[tuple[object, ...]]) -> list[object]:
        """What `ask` and `read` answer, after the operations before them.

        Operations: ("write", entry, tile, y), ("seal", entry), ("clear",), ("ask", entry) ->
        bool, ("read", entry) -> the entry's tiles, or None where there is no valid entry.
        """
        valid: set[object] = set()
        held: dict[object, list[int]] = {}
        answers: list[object] = []
        for what, *given in operations:
            if what == "write":
                entry, tile, y = given
                valid.discard(entry)
                held[entry, tile] = ints(y, "y").tolist()  # type: ignore[arg-type]
            elif what == "seal":
                valid.add(given[0])
            elif what == "clear":
                valid.clear()
            elif what == "ask":
                answers.append(given[0] in valid)
            elif given[0] in valid:
                answers.append([held[given[0], tile] for tile in range(self.tiles)])
            else:
                answers.append(None)
        return answers

    def cycles(self) -> int:
        """A read of one entry: one tile a cycle, 3 cycles after it was asked for."""
        return self.tiles + 3

    def write_layout(self) -> data.StructLayout:
        return data.StructLayout(
            {
                "entry": index(self.entries),
                "tile": index(self.tiles),
                "y": data.ArrayLayout(signed(8), self.lanes),
            }
        )

    def create(self) -> ReplayCacheUnit:
        return ReplayCacheUnit(self)


class ReplayCacheUnit(wiring.Component):
    """Reads and writes one tile a cycle each; clearing takes `entries` cycles, in which all wait.

    Members
    -------
    ask : In(stream of entry), hit : Out(stream of 1 bit)
        Whether the entry is valid; answered one cycle later.
    read : In(stream of {entry, tag}), o : Out(stream of {tag, tile, y})
        The entry's tiles in order, the first 3 cycles after `read` was taken. Asking for an entry
        that is not valid gives nothing.
    write : In(stream of {entry, tile, y})
    seal : In(stream of entry)
        Goes before a write in the same cycle.
    clear : In(stream of 1 bit)
    """

    def __init__(self, params: ReplayCache) -> None:
        self.params = params
        entry = index(params.entries)
        out = data.StructLayout(
            {
                "tag": index(params.tags),
                "tile": index(params.tiles),
                "y": data.ArrayLayout(signed(8), params.lanes),
            }
        )
        read = data.StructLayout({"entry": entry, "tag": index(params.tags)})
        self.out = out
        super().__init__(
            {
                "ask": In(stream.Signature(entry)),
                "hit": Out(stream.Signature(1)),
                "read": In(stream.Signature(read)),
                "o": Out(stream.Signature(out)),
                "write": In(stream.Signature(params.write_layout())),
                "seal": In(stream.Signature(entry)),
                "clear": In(stream.Signature(1)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        cache = self.params
        m.submodules.valid = valid = Memory(shape=1, depth=cache.entries, init=[])
        m.submodules.tiles = tiles = Memory(
            shape=8 * cache.lanes, depth=cache.entries * cache.tiles, init=[]
        )
        mark, put = valid.write_port(), tiles.write_port()
        valid_port = valid.read_port(transparent_for=(mark,))
        known = valid.read_port(transparent_for=(mark,))
        get = tiles.read_port(transparent_for=(put,))

        clearing, sweep = Signal(), Signal(index(cache.entries))
        with m.If(clearing):
            m.d.sync += sweep.eq(sweep + 1)
            with m.If(sweep == cache.entries - 1):
                m.d.sync += [clearing.eq(0), sweep.eq(0)]
        with m.Elif(self.clear.valid):
            m.d.sync += clearing.eq(1)

        entry, tile = Signal(index(cache.entries)), Signal(index(cache.tiles))
        tag = Signal(index(cache.tags))
        reading, checked = Signal(), Signal()
        m.submodules.outbox = outbox = Outbox(self.out, depth=4)
        m.d.comb += [
            self.clear.ready.eq(~clearing),
            self.seal.ready.eq(~clearing),
            self.write.ready.eq(~clearing & ~self.seal.valid),
            mark.en.eq(clearing | self.seal.valid | self.write.valid),
            mark.data.eq(~clearing & self.seal.valid),
            mark.addr.eq(
                Mux(clearing, sweep, Mux(self.seal.valid, self.seal.payload, self.write.p.entry))
            ),
            put.en.eq(self.write.valid & self.write.ready),
            put.addr.eq(self.write.p.entry * cache.tiles + self.write.p.tile),
            put.data.eq(self.write.p.y),
        ]

        m.d.comb += [
            self.ask.ready.eq(~clearing & (~self.hit.valid | self.hit.ready)),
            valid_port.en.eq(self.ask.valid & self.ask.ready),
            valid_port.addr.eq(self.ask.payload),
            self.hit.payload.eq(valid_port.data),
        ]
        with m.If(self.ask.valid & self.ask.ready):
            m.d.sync += self.hit.valid.eq(1)
        with m.Elif(self.hit.ready):
            m.d.sync += self.hit.valid.eq(0)

        # the valid bit is read first; a tile is asked for only once it was seen
        fetch = Signal()
        m.d.comb += [
            self.read.ready.eq(~clearing & ~reading),
            known.en.eq(self.read.valid & self.read.ready),
            known.addr.eq(self.read.p.entry),
            fetch.eq(reading & (known.data | checked) & outbox.room),
            get.en.eq(fetch),
            get.addr.eq(entry * cache.tiles + tile),
            outbox.start.eq(fetch),
            outbox.push.eq(delayed(m, fetch, 1)),
            outbox.payload.y.as_value().eq(get.data),
            outbox.payload.tile.eq(delayed(m, tile, 1)),
            outbox.payload.tag.eq(delayed(m, tag, 1)),
        ]
        wiring.connect(m, wiring.flipped(self.o), outbox.o)
        with m.If(self.read.valid & self.read.ready):
            m.d.sync += [reading.eq(1), checked.eq(0), tile.eq(0)]
            m.d.sync += [entry.eq(self.read.p.entry), tag.eq(self.read.p.tag)]
        with m.If(reading):
            m.d.sync += checked.eq(checked | known.data)
            with m.If(~(known.data | checked)):
                m.d.sync += reading.eq(0)
            with m.If(fetch):
                m.d.sync += tile.eq(tile + 1)
                with m.If(tile == cache.tiles - 1):
                    m.d.sync += reading.eq(0)
        return m
