"""Scheduling of memory ports: hardware equal to its schedule, and what a replayed MLP frees."""

import itertools

import numpy as np
import pytest

from tachyscope_fpga.parts.ports import MLP, Environment, PortScheduler
from tachyscope_fpga.tools.simulate import simulate


def run(ports, kv, replay, around):
    """The hardware with a memory and arrays around it that keep the schedule's times."""
    flow = ports.compute(kv, replay, around)
    unit = ports.create()
    now, free = [0], [0]

    def at(times):
        """A stall trace: each beat is shown in its own cycle."""
        times = iter(times)
        due = next(times)
        for cycle in itertools.count():
            yield cycle < due
            if cycle >= due:
                due = next(times, 1 << 60)

    def memory():
        for cycle in itertools.count():
            yield cycle < free[0] or around.takes(cycle) != cycle

    def on_cycle(cycle, seen):
        if seen["valid"] and seen["ready"]:
            free[0] = around.busy_until(cycle)
        now[0] = cycle + 1

    trace = simulate(
        unit,
        {
            "token": list(kv),
            "verdict": [flag for flags in replay for flag in flags],
            "release": [0] * len(flow.released),
            "layer": [0] * len(flow.layers),
        },
        {"fetch": len(flow.fetches)},
        {
            "verdict": at(flow.verdicts),
            "release": at(flow.released),
            "layer": at(flow.layers),
            "fetch": memory(),
        },
        watch={"valid": unit.fetch.valid, "ready": unit.fetch.ready},
        on_cycle=on_cycle,
    )
    return trace, flow


UNEVEN = Environment(3, 9, (1, 2, 3, 1, 2), (4, 3, 5, 6, 2), verdict=7, replay=3)
SLOW = pytest.mark.slow


@pytest.mark.parametrize("drs", [True, False])
@pytest.mark.parametrize(
    ("tail", "around"),
    [
        (3, UNEVEN),
        pytest.param(0, UNEVEN, marks=SLOW),
        pytest.param(0, Environment(), marks=SLOW),
        pytest.param(
            3,
            Environment(service=2, latency=30, verdict=25, refresh_every=50, refresh_for=7),
            marks=SLOW,
        ),
    ],
)
def test_hardware_fetches_in_the_cycles_of_its_schedule(drs, tail, around):
    rng = np.random.default_rng(1)
    ports = PortScheduler(layers=4, qkv=5, o=2, mlp=9, tail=tail, slots=6, drs=drs)
    replay = (rng.random((5, 4)) < 0.6).tolist()
    trace, flow = run(ports, [1, 2, 3, 4, 5], replay, around)
    assert (
        list(
            zip(trace.cycles["fetch"], (b["segment"] for b in trace.payloads["fetch"]), strict=True)
        )
        == flow.fetches
    )


def test_blocks_of_a_replayed_mlp_are_never_fetched_and_none_other_is_left_out():
    ports = PortScheduler(layers=3, qkv=4, o=2, mlp=7, tail=1, slots=4)
    replay = [[True, False, True], [False, False, False]]
    flow = ports.compute([3, 4], replay, Environment())
    assert flow.blocks == {"qkv": 24, "kv": 21, "o": 12, "mlp": 28, "tail": 2}
    assert sum(segment == MLP for _, segment in flow.fetches) == 7 * 4


def test_drs_keeps_the_memory_busy_where_the_layers_order_leaves_it_idle():
    """The arrays are four times as fast as the memory, the output projection covers the gate's time, the slots the vectors'."""
    around = Environment(service=4, latency=40, depends=(20,) * 5, verdict=20, replay=20)
    replay = [[True] * 16] * 4
    cycles = 4 * 4 * 16 * (60 + 2 + 20)
    busy = {
        drs: cycles
        / PortScheduler(16, 60, 20, 160, slots=64, drs=drs).cycles([2] * 4, replay, around)
        for drs in (True, False)
    }
    assert busy[True] > 0.95 > 0.85 > busy[False]


def test_without_replay_the_schedule_is_the_same_with_drs_on_and_off():
    around, replay = Environment(service=2), [[False] * 4] * 2
    flows = [
        PortScheduler(4, 5, 2, 9, drs=drs).compute([2, 2], replay, around) for drs in (True, False)
    ]
    assert flows[0].fetches == flows[1].fetches


def test_a_block_that_meets_refreshes_takes_as_many_cycles_more():
    around = Environment(service=25, refresh_every=10, refresh_for=4)
    awake = [cycle for cycle in range(200) if cycle % 10 >= 4]
    for cycle in awake[:30]:
        assert around.busy_until(cycle) == awake[awake.index(cycle) + 24] + 1
