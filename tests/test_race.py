"""Plans side by side by one clock: each made alone, shown when it was there, told in the picture."""

import json

import numpy as np
import pytest

import tachyscope.race as race_module
from tachyscope.cli import main
from tachyscope.models.registry import load
from tachyscope.race import FPS, Recorded, pictures, race
from tachyscope.rollout import rollout
from tachyscope.runs import Run
from tachyscope.video import read_frames


def recorded(name, took, shade, frames=2.0, **more):
    """A run whose chunks took so many ms, a shade of grey a frame."""
    rows = [
        {"wall_ms": ms, "frames": frames, "frames_made": frames, "cache_mb": 7.0 * (i + 1),
         "entries_before": 4.0 * i} | more for i, ms in enumerate(took)
    ]  # fmt: skip
    count = int(frames) * len(took)
    grey = np.arange(shade, shade + count, dtype=np.uint8)
    return Recorded(
        name, Run(name, name, rows, {}), np.tile(grey[:, None, None, None], (1, 8, 8, 3))
    )


def test_a_frame_is_shown_when_its_chunk_was_there():
    run = recorded("a", [1000.0, 500.0, 2000.0], 100)
    assert run.chunk_s == [1.0, 1.5, 3.5]
    # the second frame of a chunk half way to the next one; the last chunk's over its own time
    assert run.frame_s == [1.0, 1.25, 1.5, 2.5, 3.5, 4.5]


def test_the_picture_tells_clock_rate_and_bytes():
    run = recorded("a", [1000.0, 500.0, 400.0, 400.0], 100, host_mb=2830.0)
    assert run.caption(0.5) == "0.5 s\n"
    assert run.caption(1.2) == "1.2 s   2.0 frames/s   warm-up\ncache 7.0 MB, 2.8 GB in host memory"
    assert run.caption(2.0).startswith("2.0 s   3.2 frames/s\ncache 21 MB")
    assert run.caption(9.0).startswith("2.3 s, done   3.5 frames/s\ncache 28 MB")


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


def test_more_runs_than_fit_a_row_stand_below():
    runs = [recorded(str(i), [40.0], 50 * i) for i in range(4)]
    last = list(pictures(runs, 1.0))[-1]
    assert last.shape[1] > last.shape[2] > 2 * 256
    half = last.shape[1] // 2
    assert [middle(last, 1), middle(last[:, half:], 1)] == [51, 151]


@pytest.mark.slow
def test_runs_are_made_one_after_another_and_are_those_of_a_rollout(tmp_path, monkeypatch):
    model, order = load("toy-chunks"), []
    asked = {"frames": 5, "prompt": "a red room", "actions": "w*3", "seed": 3}
    warm = race_module.warm
    monkeypatch.setattr(
        race_module,
        "warm",
        lambda m, plan, **more: order.append(f"warm {plan}") or warm(m, plan, **more),
    )
    found = race(
        model, ["dense", "cache=window:budget=6f", "dense"], **asked, out=tmp_path, command="words",
        watch=lambda name, chunk: order.append(name),
    )  # fmt: skip
    names = ["dense", "cache=window:budget=6f", "dense 2"]
    assert order == [x for name in names for x in (f"warm {name.removesuffix(' 2')}", name, name)]
    rows = found.document["rows"]
    assert [row["name"] for row in rows] == names
    assert [row["psnr_dense"] for row in rows[1:]] == [pytest.approx(100.0)] * 2
    assert all(
        len(row["frame_s"]) == 5 and row["frame_s"] == sorted(row["frame_s"]) for row in rows
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "race.html",
        "race.json",
        "race.mp4",
    ]
    assert json.loads((tmp_path / "race.json").read_text())["rows"][0]["name"] == "dense"
    page = (tmp_path / "race.html").read_text()
    assert "Frames over time" in page and "words" in page and "https:" not in page
    # the last picture holds the last frame of every run
    last = np.concatenate([chunk.frames for chunk in rollout(model, "dense", **asked)])[-1]
    scale = 256 // min(last.shape[:2])
    video = read_frames(tmp_path / "race.mp4")[-1]
    height, width = (side * scale for side in last.shape[:2])
    seen = video[35 : 35 + height, 8 : 8 + width].astype(int)
    assert np.abs(seen - last.repeat(scale, 0).repeat(scale, 1)).mean() < 8


def test_faults_are_one_line(tmp_path, capsys):
    for words, told in {
        "--plans ;": "--plans are texts set apart by ';', got ';'",
        "--plans dense;magic": "no plan 'magic'",
        "--speed 0": "--speed must be from 0.01 to 10,000, got 0",
        "--plan fast": "tachyscope race has no option --plan: did you mean --plans",
    }.items():
        assert main(["race", "toy-chunks", "--out", str(tmp_path), *words.split()]) == 2
        err = capsys.readouterr().err
        assert told in err and err.count("\n") == 1
