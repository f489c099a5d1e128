"""The simulation of served sessions, against what is known of queues."""

import dataclasses
import runpy
from pathlib import Path

import pytest

pytest.importorskip("simpy", reason="the extra ray is not installed")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def simulation():
    return runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "simulate_sessions.py"))


def erlang_b(load, servers):
    """The share of arrivals that find all servers taken."""
    blocked = 1.0
    for n in range(1, servers + 1):
        blocked = load * blocked / (n + load * blocked)
    return blocked


def test_a_fleet_refuses_what_erlang_s_formula_says(simulation):
    load = dataclasses.replace(
        simulation["LOADS"]["tiny decoder, 16 frames/s"], failures_per_day=1e-9
    )
    fleet = simulation["refusals"](load, 20, 11, 2, seed=1)
    assert fleet.arrived > 19_000
    assert fleet.refused / fleet.arrived == pytest.approx(erlang_b(20, 22), rel=0.1)


def test_chunks_are_late_once_there_is_more_work_than_time(simulation):
    load = simulation["LOADS"]["tiny decoder, 16 frames/s"]
    late = simulation["late_share"]
    assert late(load, 2, 300.0, 0) < 0.01
    assert late(load, 3, 300.0, 0) > 0.5  # three times 281 ms in 750


def test_sessions_of_a_machine_that_dies_move_while_there_is_room(simulation):
    fleet = simulation["Fleet"](3, 2)
    assert all(fleet.take(i) for i in range(4))
    dead = fleet.where[0]
    held = len(fleet.held[dead])
    fleet.fail(dead)
    assert fleet.moved == held and sum(map(len, fleet.held)) + fleet.lost == 4
    assert dead not in fleet.where.values()
