"""Dynamic resource scheduling: every job once, on one core, and no core idle while work waits."""

import itertools
from collections import Counter

import numpy as np
import pytest

from tachyscope_fpga.parts.drs import RowScheduler
from tachyscope_fpga.tools.simulate import simulate


def run(drs, replay, job_cycles):
    """Jobs as the hardware dealt them, with cores that take `job_cycles` for each."""
    unit = drs.create()
    active = [0] * drs.cores

    class Core:
        """Stall trace of one core's port: ready in the last cycle of a job."""

        def __init__(self, number):
            self.number = number

        def __iter__(self):
            while True:
                yield active[self.number] < job_cycles - 1

    watch = {f"v{c}": unit.jobs[c].valid for c in range(drs.cores)}

    def on_cycle(cycle, seen):
        for c in range(drs.cores):
            active[c] = 0 if not seen[f"v{c}"] or active[c] == job_cycles - 1 else active[c] + 1

    units = drs.tiles // drs.tiles_per_job
    expected = drs.compute(replay, job_cycles)
    counts = Counter(job.core for job in expected)
    trace = simulate(
        unit,
        {"verdict": [{"row": r, "replay": flag} for r, flag in enumerate(replay)]},
        {f"jobs[{c}]": counts[c] for c in range(drs.cores)}
        | {"dealt": units * sum(not r for r in replay), "replays": sum(replay)},
        {f"jobs[{c}]": Core(c) for c in range(drs.cores)},
        watch=watch,
        on_cycle=on_cycle,
        settle=3,
    )
    return trace, expected


@pytest.mark.parametrize("deal", ["static", "rows", "tiles"])
@pytest.mark.parametrize(
    ("rows", "cores"), [(1, 1), (5, 3), pytest.param(32, 8, marks=pytest.mark.slow)]
)
def test_hardware_deals_as_its_schedule(deal, rows, cores):
    rng = np.random.default_rng(rows)
    for share, job_cycles in [(0.0, 3), (0.5, 4), (0.9, 3), (1.0, 3)]:
        drs = RowScheduler(rows, cores, tiles=3, deal=deal)
        replay = (rng.random(rows) < share).tolist()
        trace, expected = run(drs, replay, job_cycles)
        assert [(b["core"], b["row"], b["tile"]) for b in trace.payloads["dealt"]] == [
            (j.core, j.row, j.tile) for j in expected
        ]
        assert trace.cycles["dealt"] == [job.first for job in expected]
        for core in range(cores):
            assert trace.cycles[f"jobs[{core}]"] == [
                job.last for job in expected if job.core == core
            ]
        assert trace.payloads["replays"] == [row for row in range(rows) if replay[row]]


def busiest(jobs):
    return max(Counter(job.core for job in jobs).values(), default=0)


@pytest.mark.parametrize("cores", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("deal", ["rows", "tiles"])
def test_makespan_is_the_work_conserving_bound(deal, cores):
    """Over every number of computing rows: no core is idle while work waits."""
    rng = np.random.default_rng(cores)
    drs = RowScheduler(32, cores, tiles=4, deal=deal)
    for computing in range(33):
        replay = np.ones(32, bool)
        replay[rng.permutation(32)[:computing]] = False
        jobs = drs.compute(replay.tolist(), job_cycles=50)
        assert busiest(jobs) == drs.bound(computing)
        if deal == "rows":
            assert busiest(jobs) == -(-computing // cores)
        # one job is dealt a cycle, so the cores start one after the other; nothing else is lost
        late = min(cores, len(jobs))
        last = max((job.last for job in jobs), default=31)
        assert drs.bound(computing) * 50 <= last - 31 <= drs.bound(computing) * 50 + late


def test_static_mapping_leaves_cores_idle_where_dealing_does_not():
    replay = [row % 4 != 0 for row in range(32)]  # rows 0, 4, 8 ... compute: all on core 0
    longest = {
        deal: busiest(RowScheduler(32, 4, 1, deal).compute(replay, 10))
        for deal in ("static", "rows")
    }
    assert longest == {"static": 8, "rows": 2}


def test_tiles_keep_the_cores_busy_to_replay_90_percent_at_width_4096():
    """A 32x32 core, K = N = 4,096: 128 tiles of 128 beats a row."""
    for cores, computing in itertools.product((2, 4, 8), (32, 16, 6, 3, 1)):
        drs = RowScheduler(32, cores, tiles=128, deal="tiles")
        replay = [row >= computing for row in range(32)]
        busy = computing * 128 * 128
        assert busy / (cores * (drs.cycles(replay, 128) - drs.rows)) >= 0.9
