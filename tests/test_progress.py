"""What a person sees while a run goes on, and what a log gets."""

import functools
import io

import numpy as np
import pytest
from rich.console import Console

from tachyscope import progress
from tachyscope.types import Chunk

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
    with progress.frames_bar(6) as watch:
        watch("fast", chunk())
    said = terminal.getvalue()
    assert "3/6 frames 25.0 frames/s, cache 2.0 MB, 25% of dense's pairs" in said
    assert said.rstrip().partition("\x1b[?25h")[0].rstrip().endswith(" left")


def test_a_finished_bar_tells_the_time_taken(terminal):
    with progress.frames_bar(6) as watch:
        watch("fast", chunk())
        watch("fast", chunk())
    assert "6/6 frames" in terminal.getvalue() and " taken" in terminal.getvalue()


def test_quiet_shows_no_bar(terminal):
    with progress.frames_bar(6, quiet=True) as watch:
        watch("fast", chunk())
    assert terminal.getvalue() == ""


def test_a_log_gets_a_line_now_and_then(monkeypatch, capsys):
    seconds = iter([0.0, 4.0, 11.0, 12.0, 30.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    with progress.parts_bar() as watch:
        for done in range(1, 5):
            watch("worlds", done)
    assert capsys.readouterr() == (
        "",
        "measuring, which takes minutes; lines will say how far it is\n"
        "2 worlds after 11 s\n4 worlds after 30 s\n",
    )
