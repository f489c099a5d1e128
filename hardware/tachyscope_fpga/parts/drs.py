"""Dynamic Resource Scheduling over rows: which core computes which row, once some rows replay.

FastCar's unit (arXiv 2505.14709) keeps an index bit and a mapping register for every row of the
batch: rows that replay are dropped, the others are dealt to the cores in turn. Here a row can also
be dealt tile by tile, so that one row left keeps all cores busy; and dealing can be switched off.
The other kind, for one row, is in ``ports.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from amaranth.hdl import Array, Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from tachyscope_fpga.errors import TachyscopeError
from tachyscope_fpga.parts.fixed import check_choice, check_range, index

DEALS = ("static", "rows", "tiles")


@dataclass(frozen=True)
class Job:
    """One piece of work: when it was dealt, and its first and last cycle on its core."""

    core: int
    row: int
    tile: int
    first: int
    last: int


@dataclass(frozen=True)
class RowScheduler:
    """Deals the rows that compute to `cores` cores; a job is a row, or a tile of a row.

    Parameters
    ----------
    deal : "static", "rows" or "tiles"
        "static": row r runs on core r % cores whether or not others replay (DRS off). "rows": a
        free core takes the next whole row. "tiles": a free core takes the next tile of a row.
    """

    rows: int = 32
    cores: int = 4
    tiles: int = 4
    deal: str = "tiles"

    def __post_init__(self) -> None:
        check_range("RowScheduler rows", self.rows, 1, 32)
        check_range("RowScheduler cores", self.cores, 1, 32)
        check_range("RowScheduler tiles", self.tiles, 1, 2**14)
        check_choice("RowScheduler deal", self.deal, DEALS)

    @property
    def tiles_per_job(self) -> int:
        return 1 if self.deal == "tiles" else self.tiles

    def bound(self, computing: int) -> int:
        """Jobs on the busiest core when no core is idle while work waits."""
        return -(-computing * self.tiles // self.tiles_per_job // self.cores)

    def compute(self, replay: Sequence[bool], job_cycles: int) -> list[Job]:
        """The jobs in the order they are dealt, when every job takes `job_cycles` cycles.

        Cycle 0 takes the first verdict, one a cycle. One job is dealt a cycle, to the lowest free
        core that has work; it runs from the next cycle on, and a core can be dealt its next job in
        the last cycle of the one before.
        """
        if len(replay) != self.rows:
            raise TachyscopeError(f"replay must have {self.rows} flags, got {len(replay)}")
        check_range("job_cycles", job_cycles, 1, 2**31)
        units = self.tiles // self.tiles_per_job
        waiting = [
            (row, tile) for row in range(self.rows) if not replay[row] for tile in range(units)
        ]
        free = [0] * self.cores  # the first cycle in which a core can be dealt a job
        jobs: list[Job] = []
        now = self.rows
        while waiting:
            chances = [
                (max(now, free[core]), core, job)
                for core in range(self.cores)
                for job in [self._next(waiting, core)]
                if job is not None
            ]
            now, core, job = min(chances, key=lambda chance: chance[:2])
            waiting.remove(job)
            free[core] = now + job_cycles
            jobs.append(Job(core, *job, first=now + 1, last=now + job_cycles))
            now += 1
        return jobs

    def _next(self, waiting: list[tuple[int, int]], core: int) -> tuple[int, int] | None:
        mine = (job for job in waiting if self.deal != "static" or job[0] % self.cores == core)
        return next(mine, None)

    def cycles(self, replay: Sequence[bool], job_cycles: int) -> int:
        """From the first verdict to the last cycle of the last job, or the last verdict."""
        return max((job.last + 1 for job in self.compute(replay, job_cycles)), default=self.rows)

    def job_layout(self) -> data.StructLayout:
        return data.StructLayout({"row": index(self.rows), "tile": index(self.tiles)})

    def create(self) -> RowSchedulerUnit:
        return RowSchedulerUnit(self)


class RowSchedulerUnit(wiring.Component):
    """After `rows` verdicts deals one job a cycle, until all are done; then takes verdicts again.

    Members
    -------
    verdict : In(stream of {row, replay})
        One beat for every row of the batch, in any order.
    jobs : Array(Out(stream of {row, tile}))
        The job that a core runs now: shown from its first cycle, taken by the core in its last.
        Without "tiles" a job is all tiles of the row and `tile` is 0.
    dealt : Out(stream of {core, row, tile})
        Every job once, one cycle after it was dealt: for whoever fetches the weights.
    replays : Out(stream of row)
        The rows that replay, lowest first.
    mapping : Out(rows x core)
        The mapping registers: where each row (its newest tile) was sent.
    index : Out(rows)
        The index register: 1 computes, 0 replays.
    """

    def __init__(self, params: RowScheduler) -> None:
        self.params = params
        job = params.job_layout()
        dealt = data.StructLayout(
            {"core": index(params.cores), "row": index(params.rows), "tile": index(params.tiles)}
        )
        verdict = data.StructLayout({"row": index(params.rows), "replay": 1})
        super().__init__(
            {
                "verdict": In(stream.Signature(verdict)),
                "jobs": Out(stream.Signature(job)).array(params.cores),
                "dealt": Out(stream.Signature(dealt)),
                "replays": Out(stream.Signature(index(params.rows))),
                "mapping": Out(data.ArrayLayout(index(params.cores), params.rows)),
                "index": Out(params.rows),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        drs = self.params
        seen = Signal(range(drs.rows + 1))
        dealing = Signal()
        waiting = Signal(drs.rows)  # rows with jobs not dealt yet
        replaying = Signal(drs.rows)
        tile = Signal(index(drs.tiles))
        slots = self.jobs

        m.d.comb += self.verdict.ready.eq(~dealing)
        with m.If(self.verdict.valid & ~dealing):
            row, replay = self.verdict.p.row, self.verdict.p.replay
            m.d.sync += [
                waiting.bit_select(row, 1).eq(~replay),
                self.index.bit_select(row, 1).eq(~replay),
                replaying.bit_select(row, 1).eq(replay),
                seen.eq(seen + 1),
            ]
            with m.If(seen == drs.rows - 1):
                m.d.sync += [dealing.eq(1), seen.eq(0), tile.eq(0)]

        # the next row of every core, and the lowest free core that has one
        free = [~slot.valid | slot.ready for slot in slots]
        allowed = [waiting & _rows_of(drs, core) for core in range(drs.cores)]
        able = Cat(is_free & mask.any() for is_free, mask in zip(free, allowed, strict=True))
        core, row = Signal(index(drs.cores)), Signal(index(drs.rows))
        grant = Signal()
        m.d.comb += [
            core.eq(_lowest(able)),
            row.eq(_lowest(Array(allowed)[core])),
            grant.eq(dealing & able.any() & (~self.dealt.valid | self.dealt.ready)),
        ]
        with m.If(grant):
            last = tile == drs.tiles - 1 if drs.deal == "tiles" else Const(1)
            m.d.sync += [
                self.mapping[row].eq(core),
                self.dealt.valid.eq(1),
                self.dealt.p.eq(Cat(core, row, tile)),
            ]
            with m.If(last):
                m.d.sync += [waiting.bit_select(row, 1).eq(0), tile.eq(0)]
            with m.Else():
                m.d.sync += tile.eq(tile + 1)
        with m.Elif(self.dealt.ready):
            m.d.sync += self.dealt.valid.eq(0)
        for number, slot in enumerate(slots):
            with m.If(grant & (core == number)):
                m.d.sync += [slot.valid.eq(1), slot.p.row.eq(row), slot.p.tile.eq(tile)]
            with m.Elif(slot.ready):
                m.d.sync += slot.valid.eq(0)

        m.d.comb += [
            self.replays.valid.eq(dealing & replaying.any()),
            self.replays.payload.eq(_lowest(replaying)),
        ]
        with m.If(self.replays.valid & self.replays.ready):
            m.d.sync += replaying.bit_select(self.replays.payload, 1).eq(0)

        busy = Cat(slot.valid & ~slot.ready for slot in slots).any()
        with m.If(dealing & ~waiting.any() & ~replaying.any() & ~busy & ~self.dealt.valid):
            m.d.sync += dealing.eq(0)
        return m


def _rows_of(drs: RowScheduler, core: int) -> int:
    """The rows that a core may run, as a mask."""
    own = range(core, drs.rows, drs.cores) if drs.deal == "static" else range(drs.rows)
    return sum(1 << row for row in own)


def _lowest(bits: Value) -> Value:
    """The number of the lowest bit that is set."""
    lowest: Value = Const(0, index(len(bits)))
    for number in reversed(range(len(bits))):
        lowest = Mux(bits[number], Const(number, index(len(bits))), lowest)
    return lowest
