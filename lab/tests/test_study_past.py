"""What the study of a weighed past leaves behind: every room, from which its tables can be made."""

import importlib
import json

import pytest

from tachyscope.core.errors import TachyscopeError
from tachyscope.models.wan.model import WanModel
from tachyscope_lab.evaluation import regimes


@pytest.fixture
def study_past(own_policies):
    """The script, whose own policy is gone after the test."""
    return importlib.import_module("study_past")


@pytest.fixture
def played(study_past, monkeypatch):
    """The study with two rooms and plans whose dB are known; the tasks that it plays."""
    tasks = []

    def play(model, name, plan, scenes):
        tasks.append((name, plan))
        gain = {"dense": 0.0, "balanced": 1.0}.get(plan, -1.0)
        rooms = [{"room": room, "db": 20.0 + room + gain * (1 + room)} for room in scenes]
        return rooms, {"cache_mb": 2.0, "pairs_share": 0.5, "frame_ms": 9.0}

    monkeypatch.setattr(study_past, "play_regime", play)
    monkeypatch.setattr(study_past, "_scenes", lambda name, seed, rooms, device: range(rooms))
    monkeypatch.setitem(study_past.GROUPS, "named", (("half", "far"), ("balanced", "fast")))
    return tasks


def test_quality_in_float8_is_studied_even_where_it_saves_no_time(study_past, monkeypatch):
    def refuse(*given):
        raise TachyscopeError("float8 saves nothing")

    monkeypatch.setattr(WanModel, "check_fp8_gain", refuse)
    model = study_past.model_on("cpu", "fp8")
    assert model.operations is not None and model.fp8_attention


def test_every_room_and_interval_of_a_study_is_kept(study_past, played, tmp_path):
    argv = ["--out", str(tmp_path), "--groups", "named", "--rooms", "3"]
    study_past.main(argv)
    kept = [json.loads(x) for x in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {(row["regime"], row["plan"]) for row in kept} == {
        (regime, plan) for regime in ("half", "far") for plan in ("dense", "balanced", "fast")
    }
    assert all([room["room"] for room in row["rooms"]] == [0, 1, 2] for row in kept)
    made = json.loads((tmp_path / "regimes.json").read_text())
    assert made["suite"] == "world-regimes" and made["worlds"] == 3 and len(made["rows"]) == 6
    for row in made["rows"]:
        assert list(row["by_room"]) == ["0", "1", "2"]
        middle, low, high = (
            ("db", "db_low", "db_high")
            if row["plan"] == "dense"
            else ("to_dense_db", "to_dense_low", "to_dense_high")
        )
        assert row[low] < row[middle] < row[high]
    balanced = next(row for row in made["rows"] if row["plan"] == "balanced")
    assert balanced["to_dense_db"] == pytest.approx(2.0)
    assert balanced["worst_room_db"] == pytest.approx(1.0)


def test_a_study_that_was_ended_goes_on_with_what_is_left(study_past, played, tmp_path):
    argv = ["--out", str(tmp_path), "--groups", "named", "--rooms", "2"]
    study_past.main([*argv, "--regimes", "half"])
    before = len(played)
    study_past.main(argv)
    assert (before, len(played)) == (3, 6)
    made = json.loads((tmp_path / "regimes.json").read_text())
    assert [row["regime"] for row in made["rows"]] == ["half"] * 3 + ["far"] * 3


def test_float8_is_compared_with_the_model_s_own_precision_room_by_room(
    study_past, played, tmp_path
):
    argv = ["--out", str(tmp_path), "--groups", "named", "--rooms", "3", "--regimes", "half"]
    study_past.main([*argv, "--precisions", "native,fp8"])
    made = json.loads((tmp_path / "regimes.json").read_text())["rows"]
    # of float8 the plans that are studied in it, balanced not among them
    assert [(x["plan"], x.get("precision")) for x in made] == [
        ("dense", None), ("balanced", None), ("fast", None), ("dense", "fp8"), ("fast", "fp8"),
    ]  # fmt: skip
    assert all(row["to_native_db"] == 0 for row in made if "precision" in row)
    assert not any("to_native_db" in row for row in made if "precision" not in row)


def test_the_named_plans_are_studied_in_all_regimes(study_past):
    wanted, plans = study_past.GROUPS["named"]
    assert set(wanted) == set(regimes.REGIMES)
    assert {"balanced", "fast", "live", "pose"} <= set(plans)
