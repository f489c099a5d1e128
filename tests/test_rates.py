"""Rates that a user meets: warm-up apart, whole chunks, by the clock on the wall."""

import itertools

import numpy as np
import pytest
from toys import open_session

import tachyscope as ts
import tachyscope.measure.rates
from tachyscope.core.kv_allocation import cache_bytes
from tachyscope.core.rollout import rollout
from tachyscope.core.types import Chunk
from tachyscope.measure.rates import Clock, rates, tell_rates, warm_up
from tachyscope.models.registry import load


def row(wall, before, made=12.0, kept=None, graph=0.0):
    return {
        "wall_ms": wall, "chunk_ms": wall - 10, "frames_made": made,
        "frames": made if kept is None else kept, "entries_before": before, "cuda_graph": graph,
    }  # fmt: skip


def test_the_warm_up_ends_where_chunks_are_alike():
    grows = [row(100, 10 * i) for i in range(8)]
    assert warm_up(grows) == 2
    fills = [row(100, min(10 * i, 40)) for i in range(8)]
    assert warm_up(fills) == 4
    # filled by given frames before the first chunk
    assert warm_up([row(100, 40) for _ in range(8)]) == 2
    recorded = [row(100, 40, graph=float(i >= 5)) for i in range(8)]
    assert warm_up(recorded) == 5
    # a video that ends while the cache fills
    assert warm_up(fills[:4]) == 2


def test_a_steady_rate_counts_whole_chunks_after_the_warm_up():
    first = [row(9000, 0, made=9.0), row(500, 10), row(400, 20)]
    full = [row(250, 30), row(260, 30), row(900, 30), row(240, 30, kept=3.0)]
    found = rates(first + full)
    assert found["first_frame_s"] == 9.0
    assert (found["warm_chunks"], found["warm_s"]) == (3, 9.9)
    assert (found["steady_chunks"], found["steady_ms"], found["model_ms"]) == (4, 255.0, 245.0)
    assert found["p99_ms"] == 900.0 and found["recompiled"] == 0
    # the last chunk made twelve frames, of which three were kept
    assert found["fps_steady"] == found["fps_end"] == pytest.approx(12e3 / 255)
    assert found["fps_avg"] == pytest.approx(
        1e3 * (9 + 6 * 12) / sum(r["wall_ms"] for r in first + full)
    )


def test_of_a_hundred_chunks_the_longest_is_apart():
    rows = [row(100 + i, 40) for i in range(102)]
    assert rates(rows)["p99_ms"] == 200.0 and rates(rows[:-1])["p99_ms"] == 200.0
    assert rates(rows[:4])["p99_ms"] == 103.0


def test_programs_that_are_compiled_once_warm_are_told():
    rows = [row(100, 40) | {"programs": 5.0}, row(100, 40), row(100, 40), row(100, 40)]
    assert rates(rows)["recompiled"] == 0
    rows[3]["programs"] = 2.0
    assert rates(rows)["recompiled"] == 2


def test_runs_beside_each_other_count_the_same_chunks():
    grows = [row(100 + 50 * i, 10 * i) for i in range(8)]
    assert rates(grows, 5)["steady_ms"] == 400
    assert rates(grows)["steady_ms"] == 325
    assert rates(grows)["fps_end"] == pytest.approx(12e3 / 350)


def test_a_short_video_has_no_steady_rate():
    found = rates([row(900, 0), row(100, 10)])
    assert (found["warm_chunks"], found["steady_chunks"]) == (2, 0)
    assert not {"fps_steady", "steady_ms", "model_ms", "fps_end"} & found.keys()
    assert tell_rates("fast", found, 2.0) == (
        "fast: too short for a steady rate, frames/s are 24.0 on average; loading 2.0 s, first "
        "frame after 0.9 s, warm-up 1.0 s (2 chunks)."
    )


def test_a_rate_is_told_with_what_came_before_it():
    found = rates([row(900, 0), row(100, 10), row(110, 20), row(120, 30)])
    assert tell_rates("fast", found, 2.0) == (
        "fast: 104.3 frames/s once warm (115.0 ms a chunk, p99 120.0, 105.0 in "
        "the model), 39.0 on average; "
        "loading 2.0 s, first frame after 0.9 s, warm-up 1.0 s (2 chunks)."
    )


def chunk():
    return Chunk(0, np.zeros((1, 2, 2, 3), np.uint8), {})


def test_a_clock_counts_inside_its_blocks_alone(monkeypatch):
    times = iter([0.0, 1.0, 10.0, 12.0, 13.0, 20.0])
    monkeypatch.setattr(tachyscope.measure.rates.time, "perf_counter", lambda: next(times))
    clock, made = Clock(), chunk()
    with clock:  # 0 to 1
        pass
    with clock:  # 10 to 13
        clock.lap(made)  # at 12
    assert made.stats == {"wall_ms": 3000.0}
    later = chunk()
    clock.lap(later)  # at 20: only what was inside counts
    assert later.stats == {"wall_ms": 1000.0}


def test_over_a_whole_rollout_a_clock_goes_from_chunk_to_chunk(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(tachyscope.measure.rates.time, "perf_counter", lambda: float(next(ticks)))
    made = [chunk() for _ in range(3)]
    with Clock() as clock:
        for one in made:
            clock.lap(one)
    assert [one.stats["wall_ms"] for one in made] == [1000.0] * 3


def test_a_row_tells_whole_chunks_and_bytes_in_use():
    model = load("toy-chunks")
    session = open_session(model, "dense", frames=10)
    rows = [chunk.stats for chunk in rollout(model, stream=ts.Stream(model, session), frames=10)]
    assert [row["frames"] for row in rows] == [3, 3, 3, 1]
    assert [row["frames_made"] for row in rows] == [3] * 4
    assert all(row["cuda_graph"] == 0 for row in rows)
    # the cache is allocated in advance, and is in use from chunk to chunk
    held = [row["cache_allocated_mb"] for row in rows]
    assert held == [cache_bytes(session.memory.layers) / 1e6] * 4
    assert [row["cache_mb"] for row in rows] == pytest.approx(
        [x * held[0] for x in (0.5, 0.75, 1, 1)], rel=1e-4
    )


def test_a_bounded_cache_in_use_is_what_it_takes():
    model = load("toy-chunks")
    session = open_session(model, "lossless cache=dedup:budget=9f,newest=3", frames=15)
    rows = [chunk.stats for chunk in rollout(model, stream=ts.Stream(model, session), frames=15)]
    assert rows[-1]["cache_mb"] == pytest.approx(rows[-1]["cache_allocated_mb"])
    assert rows[0]["cache_mb"] < rows[-1]["cache_mb"]
    assert warm_up(rows) == 2
