"""What a person sees while a run goes on, and what a log gets."""

import functools
import io
import re
import time

import numpy as np
import pytest
import toys
from rich.console import Console

from tachyscope.core.opening import open as open_stream
from tachyscope.core.types import Chunk
from tachyscope.measure import progress

STATS = {"frames": 3.0, "frames_made": 3.0, "chunk_ms": 100.0, "wall_ms": 120.0, "cache_mb": 2.0,
         "pairs": 1.0, "pairs_dense": 4.0}  # fmt: skip


@pytest.fixture
def terminal(monkeypatch):
    file = io.StringIO()
    made = functools.partial(Console, file=file, force_terminal=True, width=160)
    monkeypatch.setattr(progress, "_terminal", made)
    return file


def chunk():
    return Chunk(0, np.zeros((3, 2, 2, 3), np.uint8), dict(STATS))


def test_a_bar_tells_rate_cache_share_and_the_time_left(terminal):
    with progress.progress(6) as watch:
        watch.chunk("fast", chunk())
    said = terminal.getvalue()
    assert "3/6 frames 25.0 frames/s, cache 2.0 MB, 25% of dense's pairs" in said
    assert said.rstrip().partition("\x1b[?25h")[0].rstrip().endswith(" left")


def test_a_finished_bar_tells_the_time_taken(terminal):
    with progress.progress(6) as watch:
        watch.chunk("fast", chunk())
        watch.chunk("fast", chunk())
    assert "6/6 frames" in terminal.getvalue() and " taken" in terminal.getvalue()


def test_what_is_printed_beside_a_bar_goes_to_a_stdout_that_is_no_terminal(terminal, capsys):
    with progress.progress(6) as watch:
        watch.stage("loading krea")
        print("for the file")
    assert capsys.readouterr().out == "for the file\n"
    assert "for the file" not in terminal.getvalue()


def test_loading_is_told_while_it_lasts(terminal):
    with progress.progress(6) as watch:
        watch.stage("loading krea")
        watch._bars.refresh()
        assert "loading krea" in terminal.getvalue()
        watch.stage("")
        assert not watch._tasks


@pytest.mark.parametrize("plan", ["dense", "fast"])
def test_given_frames_are_counted_while_they_are_read(plan, terminal):
    model = toys.load("toy-tokens")
    size = (7, *model.size, 3)
    with progress.progress(2) as watch:
        observers = watch.reading(plan, 7)
        stream = open_stream(model, plan, first=np.zeros(size, np.uint8), observers=observers)
        stream.session.unwatch(*observers)
        stream.step()
    assert f"{plan}: reading given frames" in terminal.getvalue()
    assert "7/7 frames" in terminal.getvalue()
    assert watch.reading(plan, 1) == []


def clock(monkeypatch, *seconds):
    left = iter(seconds)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(left))


def test_a_log_gets_a_line_of_a_run_now_and_then(monkeypatch, capsys):
    clock(monkeypatch, 0.0, 4.0, 11.0, 12.0)
    with progress.progress(9) as watch:
        for _ in range(3):
            watch.chunk("fast", chunk())
        watch.stage("loading")
    assert capsys.readouterr() == (
        "",
        "fast: 6 of 9 frames, 25.0 frames/s, cache 2.0 MB, 25% of dense's pairs after 11 s\n",
    )


def test_a_log_gets_a_line_now_and_then_of_a_stage_that_takes_long(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SAY_EVERY", 0.05)
    said, until = "", time.monotonic() + 60
    with progress.progress() as watch:
        watch.stage("loading krea")
        while said.count("\n") < 2 and time.monotonic() < until:
            time.sleep(0.02)
            said += capsys.readouterr().err
        watch.stage("")
        monkeypatch.setattr(progress, "SAY_EVERY", 60)
        watch.stage("quick")
    out, error = capsys.readouterr()
    assert out == "" and "quick" not in error
    lines = (said + error).splitlines()
    assert len(lines) > 1 and all(re.fullmatch(r"loading krea after \d+ s", x) for x in lines)


def test_a_log_gets_a_line_of_reading_now_and_then(monkeypatch, capsys):
    clock(monkeypatch, 0.0, 4.0, 11.0)
    with progress.progress(9) as watch:
        for done in (3, 6):
            watch.part("fast: reading given frames", done, 9, "frames")
    said = "fast: reading given frames: 6 of 9 frames after 11 s\n"
    assert capsys.readouterr() == ("", said)


def test_a_log_gets_a_line_of_parts_now_and_then(monkeypatch, capsys):
    clock(monkeypatch, 0.0, 4.0, 11.0, 12.0, 30.0)
    with progress.parts_bar() as watch:
        for done in range(1, 5):
            watch("worlds", done)
    assert capsys.readouterr() == (
        "",
        "measuring, which takes minutes; lines will say how far it is\n"
        "2 worlds after 11 s\n4 worlds after 30 s\n",
    )
