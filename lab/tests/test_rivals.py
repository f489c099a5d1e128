"""Methods held to equal bytes and pairs: settings by arithmetic, rows that are kept, plots."""

import json
import re

import pytest

from tachyscope.core.plan import Plan
from tachyscope_lab.cli.app import main
from tachyscope_lab.evaluation import rivals
from tachyscope_lab.evaluation.rivals import (
    REFERENCE,
    SIZED,
    device_bytes,
    entries_read,
    equal_bytes,
)
from tachyscope_lab.evaluation.rivals_plot import _drift, pareto
from tachyscope_lab.evaluation.world import world_models

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model():
    return world_models(None, "cpu")[0]


def test_points_that_no_other_beats():
    points = [(1.0, 5.0), (2.0, 9.0), (2.0, 8.0), (3.0, 9.0), (4.0, 10.0)]
    assert pareto(points) == [0, 1, 4]


def larger(plan):
    """The plan with the one number that was found raised by one."""
    return re.sub(
        r"(budget=|resident=|retrieve=)(\d+)", lambda m: f"{m[1]}{int(m[2]) + 1}", plan, count=1
    )


def test_no_method_has_more_bytes_and_none_could_have_one_more(model):
    plans = equal_bytes(model, 233)
    assert plans.keys() == SIZED.keys() and plans["window"] == "lossless cache=window:budget=21f"
    # by hand: a layer's window holds 21 frames of 64 entries, keys and values of 4 bytes a channel
    shape = model.shape()
    held = shape.layers * shape.kv_heads * shape.head_dim * REFERENCE * shape.tokens_per_frame * 8
    most = device_bytes(model, plans["window"], 233)
    assert held < most < 1.05 * held
    for plan in (text.replace("{all}", "233") for text in plans.values()):
        assert device_bytes(model, plan, 233) <= most, plan
        if "worldkv" not in plan:  # whose groups are of three frames
            assert device_bytes(model, larger(plan), 233) > most, plan


def test_methods_of_equal_pairs_read_as_many(model):
    most, plans = REFERENCE * 64, rivals.equal_pairs(model, 233)
    for name in ("window", "merge", "dedup", "frames", "bank", "live", "memrope", "worldkv"):
        read = entries_read(Plan.parse(plans[name]), model)
        assert 0.97 * most <= read <= most, name
    assert plans["ann k"] == f"lossless attention=ann:k={most - 64}"
    assert not {"radial", "svg", "svg2", "teacache"} & plans.keys(), "no shape tells what they read"


def test_rows_are_kept_and_a_fault_costs_no_other(model, tmp_path, monkeypatch, capsys):
    played, bad = [], ["frames"]

    def play(weights, device, floor, worlds, jobs, tasks):
        for task in tasks:
            (plan,) = task.request.plans
            if any(f"cache={name}" in plan for name in bad):
                yield task, RuntimeError("no memory")
                continue
            played.append(plan)
            row = {"revisit_db": float(len(played)), "identity": 0.5, "cache_mb": 9.0, "pairs_frame": 7.0,
                   "gmacs_frame": 1.0, "psnr_dense": 3.0}  # fmt: skip
            yield task, {"rows": [row] * worlds}

    monkeypatch.setattr(rivals, "play_tasks", play)
    monkeypatch.setattr(model, "camera", False)
    words = ["bench", "rivals", "--out", str(tmp_path), "--worlds", "2", "--rows"]
    assert main([*words, "window;frames;dedup"]) == 0
    err = capsys.readouterr().err
    assert "frames failed: no memory" in err and "are missing: go on with --resume" in err
    assert "pace 0.25 is left out: atrium-world is not told where its camera stands" in err
    document = json.loads((tmp_path / "rivals.json").read_text())
    assert document["unfinished"] and document["fingerprints"].keys() == {"atrium-world"}
    first = [(row["name"], row["groups"], row["frames"]) for row in document["rows"]]
    assert first == [
        ("window", ["bytes", "pairs"], 208), ("dedup", ["bytes"], 208), ("dedup", ["pairs"], 208),
        ("window", ["long"], 1000), ("dedup", ["long"], 1000),
    ]  # fmt: skip
    assert "psnr_dense" not in document["rows"][0]
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".svg", ".png"}
    bad.clear()
    assert main([*words, "window;frames", "--resume"]) == 0
    assert len(played) == 6 and "cache=frames" in played[-1], "what was there is not played again"
    assert len(json.loads((tmp_path / "rivals.json").read_text())["rows"]) == 6
    assert main([*words, "window", "--resume", "--seed", "1"]) == 2
    assert "was measured with another seed (0, now 1)" in capsys.readouterr().err
    assert main([*words[:-3], "--plot"]) == 0
    assert "equal bytes on the GPU: a window of 21 latent frames" in capsys.readouterr().out
    assert main([*words, "magic", "--resume"]) == 2
    assert "no row 'magic'; there are: window, merge, dedup" in capsys.readouterr().err
    # the judge finds a place again after a turn: each room would fail, one after the other
    assert main([*words, "window", "--frames", "2"]) == 2
    told = "a video has 24 frames or more at pace 1, a full turn, got 2: ask for more"
    assert told in capsys.readouterr().err


def test_drift_is_a_line_a_method_through_the_middles_of_its_stretches():
    """The best is named first; intervals and worst rooms beside a stretch's value are not drawn."""
    rows = [
        {"name": name, "model": "toy", "pace": 1.0, "worlds": 16, "runs": 3, "identity": same}
        | {f"stretch_{end}_db": 20.0 + end / 100 for end in (160, 320, 400)}
        | {f"identity_stretch_{end}": same for end in (160, 320, 400)}
        | {"stretch_160_db_low": 0.0, "identity_stretch_160_worst": 0.0}
        for name, same in (("window", 0.5), ("bank", 0.75))
    ]
    near, right = _drift(rows).axes
    assert [line.get_label() for line in near.lines] == ["bank", "window"]
    assert list(near.lines[0].get_xdata()) == [80, 240, 360]
    assert list(near.lines[0].get_ydata()) == [21.6, 23.2, 24.0]
    assert [list(line.get_ydata()) for line in right.lines] == [[0.75] * 3, [0.5] * 3]
