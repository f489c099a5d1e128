"""Regimes: what lies behind a view that comes back, and that a plan is judged by the truth."""

import pytest
import torch
from faults import refused

from tachyscope_lab.cli.app import main as run_lab
from tachyscope_lab.evaluation import regimes, scenes


@pytest.mark.parametrize(
    "name",
    ["short", *(pytest.param(name, marks=pytest.mark.slow) for name in ("slow", "half", "long"))],
)
def test_what_is_judged_was_seen_from_the_same_pose(name):
    regime = regimes.REGIMES[name]
    (number,) = regimes.rooms_of(regime, 777, 1)
    scene = scenes.make_scene(
        scenes.make_world(777, number), regime.given + regime.walk, "cpu", regime.pace
    )
    known = len(regime.given)
    first = scene.pose[: len(scenes.spell(regimes.GIVEN, regime.pace))]
    for i in regime.judged:
        off = (first - scene.pose[known + i]).abs()
        off[:, 2] = (off[:, 2] + 12) % 24 - 12
        assert off.abs().sum(1).min() < 1e-4
    assert regime.past == (known + regime.judged[0], known + regime.judged[-1])


def test_of_a_long_walk_only_rooms_that_lead_back_are_played():
    assert regimes.rooms_of(regimes.REGIMES["short"], 777, 4) == [0, 1, 2, 3]
    found = regimes.rooms_of(regimes.REGIMES["long"], 777, 4)
    assert len(found) == 4 and found != [0, 1, 2, 3]


def test_a_row_is_paired_with_dense_room_by_room():
    dense = [{"room": i, "db": x, "pairs_share": 1.0} for i, x in enumerate((20.0, 30.0, 25.0))]
    ours = [{"room": i, "db": x, "pairs_share": 0.1} for i, x in enumerate((22.0, 29.0, 28.0))]
    row = regimes.row_of("half", "fast", ours, dense)
    assert row["worst_room_db"] == -1.0 and row["worst_db"] == 22.0
    assert row["to_dense_db"] == pytest.approx(4 / 3) and row["pairs_share"] == pytest.approx(0.1)
    assert row["to_dense_low"] < row["to_dense_db"] < row["to_dense_high"]
    assert row["past"] == [60, 84]


def test_an_unknown_regime_is_refused():
    refused(lambda: regimes.evaluate_regimes(["dense"], ["fastest"]), "fastest", "slow, half")
    assert run_lab(["eval", "atrium", "--regimes", "slow", "--only", "loops"]) == 2


@pytest.mark.slow
def test_two_rooms_of_the_short_regime(tmp_path):
    made = regimes.evaluate_regimes(["balanced"], ["short"], worlds=2, seed=777, jobs=1)
    dense, balanced = made["rows"]
    assert dense["db"] > 25 and dense["pairs_share"] == 1.0
    assert balanced["pairs_share"] < 1.0 and len(balanced["by_room"]) == 2
    assert regimes.lines(made)
    torch.set_num_threads(1)
