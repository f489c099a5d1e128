"""Runs side by side by one clock: each frame when it was there, told in the picture."""

from dataclasses import replace

import numpy as np
import pytest

from tachyscope.measure import by_clock
from tachyscope.measure.by_clock import FPS, Lane, pictures, speed_of


def recorded(name, took, shade, frames=2.0, gpu=False, right=(), wrong=None, **more):
    """A run whose chunks took so many ms, a shade of grey a frame."""
    rows = [
        {"wall_ms": ms, "frames": frames, "frames_made": frames, "cache_mb": 7.0 * (i + 1),
         "entries_before": 4.0 * i} | more for i, ms in enumerate(took)
    ]  # fmt: skip
    count = int(frames) * len(took)
    grey = np.arange(shade, shade + count, dtype=np.uint8)
    pictures = np.tile(grey[:, None, None, None], (1, 8, 8, 3))
    return Lane(name, rows, pictures, wrong or (lambda frame: None), right, gpu)


def test_a_frame_is_shown_when_its_chunk_was_there():
    run = recorded("a", [1000.0, 500.0, 2000.0], 100)
    assert run.chunk_s == [1.0, 1.5, 3.5]
    # the second frame of a chunk half way to the next one; the last chunk's over its own time
    assert run.frame_s == [1.0, 1.25, 1.5, 2.5, 3.5, 4.5]


def test_the_picture_tells_rate_and_bytes():
    run = recorded("a", [1000.0, 500.0, 400.0, 400.0], 100, host_mb=2830.0)
    assert run.caption(0.5) == "\n\n"
    assert run.caption(1.2) == "2.0 frames/s\ncache 7.0 MB + 2.8 GB in RAM\n"
    assert run.caption(2.0).startswith("3.2 frames/s\ncache 21 MB")
    assert run.caption(9.0).startswith("3.5 frames/s, done in 2.3 s\ncache 28 MB")
    gpu = recorded("a", [1000.0], 100, gpu=True, host_mb=2830.0)
    assert gpu.caption(2.0).splitlines()[1] == "cache 7.0 MB on the GPU + 2.8 GB in RAM"


def test_the_picture_tells_how_many_surfaces_are_right_and_marks_the_others():
    mask = np.zeros((8, 8), bool)
    mask[:, :4] = True
    run = recorded("a", [100.0] * 2, 100, right=[(4, 4), (1, 4)], wrong=lambda i: mask & (i > 1))
    assert run.caption(0.15).splitlines()[2] == "100% of surfaces right"
    assert run.caption(0.25).splitlines()[2] == "62% of surfaces right"
    assert (run.picture(0) == 100).all()
    marked = run.picture(3)[0]
    assert (marked[:, 4:] == 103).all()
    red, green = marked[:, :4, 0].astype(int), marked[:, :4, 1].astype(int)
    assert (red > 103).all() and (green < 103).all()


def middle(picture, column):
    """The shade in the middle of a video of 8 x 8 pixels, each a square of 32."""
    return int(picture[0, 22 + 128, 8 + column * (256 + 8) + 128, 0])


def test_all_runs_are_shown_by_one_clock():
    speed = 4.0
    slow, quick = recorded("slow", [800.0] * 4, 100), recorded("quick", [400.0] * 4, 200)
    shown = list(pictures([slow, quick], speed))
    for i, picture in enumerate(shown):
        seconds = i / FPS * speed
        for column, run in enumerate((slow, quick)):
            there = [shade for at, shade in zip(run.frame_s, run.frames[:, 0, 0, 0], strict=True)
                     if at <= seconds]  # fmt: skip
            assert middle(picture, column) == (there[-1] if there else 0x14)
    assert len(shown) == pytest.approx((3.6 / speed + 2) * FPS, abs=1)


def test_the_truth_keeps_up_with_the_quickest_run():
    slow, quick = recorded("slow", [800.0] * 4, 100), recorded("quick", [400.0] * 4, 200)
    truth = np.tile(np.arange(50, 58, dtype=np.uint8)[:, None, None, None], (1, 8, 8, 3))
    for i, picture in enumerate(pictures([slow, quick], 1.0, truth)):
        done = sum(at <= i / FPS for at in quick.frame_s)
        assert middle(picture, 0) == (49 + done if done else 0x14)


def test_what_was_given_is_shown_until_a_run_has_a_frame_of_its_own():
    given = np.full((1, 8, 8, 3), 33, np.uint8)
    slow, quick = recorded("slow", [800.0] * 2, 100), recorded("quick", [400.0] * 2, 200)
    slow, quick = (replace(run, given=given) for run in (slow, quick))
    truth = np.tile(np.arange(50, 54, dtype=np.uint8)[:, None, None, None], (1, 8, 8, 3))
    first, *_, last = pictures([slow, quick], 1.0, truth)
    assert [middle(first, column) for column in range(3)] == [33, 33, 33]
    assert [middle(last, column) for column in range(3)] == [53, 103, 203]


def test_a_long_race_is_shown_faster():
    assert speed_of([recorded("a", [500.0] * 4, 100)]) == 1
    assert speed_of([recorded("a", [30_000.0] * 4, 100)]) == 120 / by_clock.LONGEST


def test_more_runs_than_fit_a_row_stand_below():
    runs = [recorded(str(i), [40.0], 30 * i) for i in range(5)]
    last = list(pictures(runs, 1.0))[-1]
    assert last.shape[1] > 2 * 256 and last.shape[2] > 3 * 256
    half = last.shape[1] // 2
    assert [middle(last, 1), middle(last[:, half:], 1)] == [31, 121]
