"""The bench of a server: what its clients count, and a short run of it."""

import random

import pytest

from tachyscope.serve.protocol import BESIDE, MAIN, Header
from tachyscope_lab.bench.sessions import Client, _turns, bench_sessions, lines


def picture(chunk, lane=MAIN):
    return Header(1, 1, lane, 0, 1, chunk, chunk)


def test_a_key_s_time_ends_with_the_first_picture_that_it_changed():
    client = Client("w", random.Random(0), pressed={1: 10.0, 3: 10.5})
    client.on_message({"type": "receipt", "id": 1, "phase": "received", "chunk": 4}, 10.1)
    client.on_message({"type": "receipt", "id": 1, "phase": "applied", "chunk": 5}, 10.6)
    client.on_message({"type": "receipt", "id": 2, "phase": "applied", "chunk": 5}, 10.6)  # let go
    client.on_picture(picture(4), 10.7)
    client.on_picture(picture(5, BESIDE), 10.8)
    assert not client.key_ms
    client.on_picture(picture(6), 11.0)  # chunk 5's was dropped
    client.on_picture(picture(7), 11.5)
    assert client.key_ms == [pytest.approx(1000)]
    assert client.pressed == {3: 10.5} and client.pictures == 4


def test_a_slow_machine_is_told_apart_from_a_session_that_starves():
    def turns(*waits):
        clients = [Client("", random.Random(0)) for _ in waits]
        for one, each in zip(clients, waits, strict=True):
            one.step_ms, one.gaps_s = [1.0] * len(each), [1.0]
            one.waits = list(enumerate(each))
        return _turns(clients)

    slow = turns([10.0] * 20 + [50.0] * 20, [10.0] * 20 + [50.0] * 20)
    assert slow["wait_worst_over_mean"] > 1.6 and slow["wait_worst_session_over_mean"] == 1
    assert slow["wait_worst_beside_others"] < 2
    unfair = turns([10.0] * 40, [10.0] * 20 + [50.0] + [10.0] * 19)
    assert unfair["wait_worst_beside_others"] > 2.5


@pytest.mark.slow
def test_a_short_run_adds_up():
    found = bench_sessions("toy-chunks", clients=3, minutes=0.1)
    (row,) = found["rows"]
    assert row["metrics_add_up"], row["metrics"]
    assert row["metrics"]["sessions"]["told"] == 3 and row["metrics"]["steps"]["told"] > 9
    assert row["keys"] and 0 < row["key_ms_p50"] <= row["key_ms_p95"]
    assert 0 < row["chunks"][0] <= row["chunks"][1] and row["rss_mb_second_half"] > 50
    assert any("add up" in line for line in lines(found))
