"""Measures say what is known of made-up frames; recall and its bookkeeping are exact."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from streams import CHUNKS, ROPE
from streams import play as stream

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.plan import Plan
from tachyscope.core.rollout import rollout
from tachyscope.core.session import Session
from tachyscope.io.results import Parts, to_json
from tachyscope.measure.quality import psnr
from tachyscope.models.atrium import visit
from tachyscope.models.atrium import world as atrium
from tachyscope.models.registry import load
from tachyscope.models.toys import toy_chunks
from tachyscope.models.wan.config import WanConfig
from tachyscope.models.wan.loading import save_wan
from tachyscope.models.wan.random import random_wan
from tachyscope_lab.cli.app import main as run_lab
from tachyscope_lab.evaluation import (
    batched_rollout,
    frame_checks,
    intervals,
    judges,
    recall,
    scenes,
    world,
    world_rows,
)

MERGES = [
    f"merge:budget=5f,match={match},keep={keep},heads={heads}"
    for match in ("rotated", "unrotated", "key_value")
    for keep in ("partner", "newest")
    for heads in ("shared", "each")
]
BY_THRESHOLD = [f"merge:threshold=0.6,match=unrotated,heads={x}" for x in ("shared", "each")]


def main(words):
    return run_lab(["eval", *words])


@pytest.fixture(scope="module")
def scene():
    return scenes.make_scene(scenes.make_world(0, 2), "." + "q" * 11)


@pytest.fixture(scope="module")
def model():
    return load("atrium-world")


def probed(plan, chunks=6, seed=0, **kwargs):
    """A probed session over random tokens, recall sampled at every chunk with a past."""
    kwargs = {"dtype": torch.float64} | kwargs
    observers = [recall.RecallObserver(kwargs.pop("wanted", range(1, chunks)))]
    plan = Plan.parse(f"dense text=none {plan}")
    at = Session(CHUNKS, plan, ROPE, observers=observers, **kwargs)
    return at, stream(at, chunks, seed)


def mean_recall(at):
    return float(
        torch.cat([x.flatten() for xs in at.observers[0].recalls.values() for x in xs]).mean()
    )


# --- what a frame shows


@pytest.mark.slow
def test_true_frames_are_right_in_everything(scene):
    index = list(range(0, 12, 3))
    assert frame_checks.surfaces_right(scene.frames[index], scene, index).nanmean() == 1.0
    place, heading = frame_checks.pose_errors(scene.frames[:2], scene, [0, 1])
    # the search ends on a grid of 0.019 of a room and 2.8 degrees, begun off the truth
    assert place < 0.03 and heading < 2.9
    assert psnr(scene.frames, scene.frames).min() == 100.0
    assert frame_checks.unsaid_db(scene.frames, scene, range(12)) > 99


def test_another_side_of_the_room_is_not_taken_for_this_one(scene):
    moved = {
        name: torch.cat(
            [value[:, :4].roll(2, 1), value[:, 4:]], 1
        )  # walls and objects, half a turn
        for name, value in vars(scene.world.rooms).items()
    }
    turned = replace(scene.world, rooms=atrium.Rooms(**moved))
    other = scenes.make_scene(turned, scene.actions)
    index = list(range(0, 12, 3))
    assert frame_checks.surfaces_right(other.frames[index], scene, index).nanmean() < 0.7


def test_a_pattern_of_the_same_colours_is_told_apart(scene):
    kind, wall = scene.world.rooms.kind.clone(), int(atrium.facing(scene.pose[0]))
    right = []
    for shown in (1, 2):
        kind[:, :4] = shown
        world = replace(scene.world, rooms=replace(scene.world.rooms, kind=kind.clone()))
        right.append(scenes.make_scene(world, "."))
    same = frame_checks.surfaces_right(right[0].frames, right[0], [0])[0, wall]
    other = frame_checks.surfaces_right(right[1].frames, right[0], [0])[0, wall]
    assert (same, other) == (1.0, 0.0)


def test_a_shifted_pose_is_found(scene):
    moved = replace(scene.world, start=scene.world.start + torch.tensor([[0.0, 0.1, 0.0]]))
    moved.start[:, :2].clamp_(atrium.NEAR, 1 - atrium.NEAR)
    true = float((moved.start - scene.world.start)[:, :2].norm())
    assert true > 0.05
    place, _ = frame_checks.pose_errors(scenes.make_scene(moved, ".").frames, scene, [0])
    assert abs(place - true) < 0.03


def test_a_frozen_video_is_flagged(scene):
    still = np.repeat(scene.frames[:1], 11, 0)
    assert frame_checks.stopped(still, scene.frames[1:], scene.frames[0]) == 1.0
    assert frame_checks.stopped(scene.frames[1:], scene.frames[1:], scene.frames[0]) == 0.0
    # where the truth rests too, nothing can be said
    assert math.isnan(frame_checks.stopped(still, still, scene.frames[0]))


@pytest.mark.slow
def test_named_colours_are_read_from_true_frames_and_not_from_grey_ones():
    found = []
    for number in (2, 3, 5):
        still = scenes.make_scene(scenes.make_world(0, number, motion=0.0), "." + "q" * 24)
        grey = np.full_like(still.frames, 128)
        found.append(
            [frame_checks.prompt_right(x[1:], still, range(1, 25)) for x in (still.frames, grey)]
        )
    # a room whose named walls are all in the first view says nothing
    assert [x for x in found if not math.isnan(x[0])]
    assert all(x == [1.0, 0.0] for x in found if not math.isnan(x[0]))


def test_only_frames_from_new_places_count_as_such(scene):
    middle = replace(scene.world, start=torch.tensor([[0.5, 0.5, 0.0]]))
    assert scenes.new_place(scenes.make_scene(middle, ".qqee"), 1) == []
    # forward twice, back twice: the last frame stands where the given ones do
    assert scenes.new_place(scenes.make_scene(middle, ".qqwwss"), 3) == [0, 1, 2]


# --- worlds


def test_a_world_is_the_same_alone_and_apart_from_those_of_training():
    a, b = scenes.make_world(0, 3), scenes.make_world(0, 3)
    assert torch.equal(a.rooms.colour, b.rooms.colour) and a.prompt == b.prompt
    assert not torch.equal(a.rooms.phase, scenes.make_world(1, 3).rooms.phase)
    assert not torch.equal(a.rooms.phase, scenes.make_world(0, 4).rooms.phase)
    # a CPU generator keeps 32 bits, and training's own scores begin at 2^31
    assert visit.UNSEEN > 2**31 + 10**6 and visit.UNSEEN + visit.WORLDS == 2**32
    with pytest.raises(TachyscopeError, match="from 0 to 999, got 1000 and 0"):
        scenes.make_world(1000, 0)


def test_world_3_of_an_evaluation_is_world_3_of_the_command_line():
    one = scenes.make_scene(scenes.make_world(0, 3), ".qqw")
    walk = visit.Visit(3, [5, 5, 1])
    assert one.world.prompt == walk.prompt
    assert np.array_equal(one.frames, walk.frames(0, 4))
    assert scenes.make_world(2, 3).number == 2003


def test_the_walk_shows_a_turn_again_and_then_leaves_its_place():
    scene = scenes.make_scene(scenes.make_world(0, 0), world.GIVEN + world.WALK[:4])
    for i in range(4):
        assert torch.equal(scene.pose[25 + i], scene.pose[1 + i])
    assert max(judges.HORIZONS) <= len(world.WALK)
    # recall's last sample has 128 latent frames before it
    assert world.PROBED[-1] == len(world.WALK) == 129 - len(world.GIVEN)


# --- recall


def test_recall_of_a_case_by_hand():
    dense = torch.tensor([[0.1, 0.2, 0.3, 0.15, 0.25]])  # four past entries, one of now
    # entries 0 and 2 were merged in slot 0, entry 1 is gone, entry 3 in slot 1
    method = torch.tensor([[0.5, 0.1, 0.4]])
    found = recall.recall_of(method, dense, torch.tensor([0, -1, 0, 1]))
    # min(0.4, 0.5) + min(0.15, 0.1) + min(0.25, 0.4)
    assert found.item() == pytest.approx(0.75)


def test_recall_of_dense_is_one_and_probing_changes_nothing():
    for plan in ("", "cache=merge:budget=5f", "attention=ann:k=12,block=2,tile=3"):
        at, out = probed(plan)
        plain = Session(CHUNKS, at.plan, ROPE, dtype=torch.float64)
        for x, y in zip(out, stream(plain, 6), strict=True):
            assert torch.equal(x[0], y[0])
        assert (mean_recall(at) == pytest.approx(1.0)) == (plan == "")


@pytest.mark.parametrize("cache", [*MERGES, *BY_THRESHOLD])
def test_every_entry_is_followed_into_its_group(cache):
    at, _ = probed(f"cache={cache}", chunks=9)
    for layer, slots in zip(at.memory.layers, at.observers[0].slots, strict=True):
        assert int(slots.min()) >= 0  # merging loses nobody
        weight = layer.log_count[:, :, : at.memory.past].double().exp()
        count = torch.zeros_like(weight).scatter_add_(2, slots, torch.ones_like(slots).double())
        torch.testing.assert_close(count, weight, rtol=1e-5, atol=1e-5)
    assert at.memory.past < at.memory.total_entries
    assert 0.2 < mean_recall(at) < 1


def test_who_is_dropped_is_followed_to_who_stands_for_it():
    at, _ = probed("cache=dedup:budget=5f", chunks=9)
    folded, _ = probed("cache=merge:budget=5f", chunks=9)
    # the same keys are kept, so the first layer's groups are the same; here weights do not tell
    assert torch.equal(at.observers[0].slots[0], folded.observers[0].slots[0])
    assert (at.memory.layers[0].log_count == 0).all() and folded.memory.layers[
        0
    ].log_count.max() > 0


@pytest.mark.parametrize("positions", ["absolute", "reindexed"])
def test_a_window_keeps_its_sink_and_newest_entries(positions):
    at, _ = probed(f"cache=window:budget=5f,positions={positions}", chunks=9)
    n = CHUNKS.tokens_per_frame
    slots = at.observers[0].slots[0][0, 0]
    assert slots[:n].tolist() == list(range(n))
    assert slots[-2 * n :].tolist() == list(range(n, 3 * n))
    assert (slots[n : -2 * n] == -1).all()


def test_recall_of_a_listed_read_is_the_mass_that_was_read():
    at, _ = probed("attention=ann:read=0.5,block=2,tile=3,sink=0,newest=0", chunks=4)
    some = mean_recall(at)
    more = mean_recall(probed("attention=ann:read=0.8,block=2,tile=3,sink=0,newest=0", 4)[0])
    every = mean_recall(probed("attention=ann:read=1,block=2,tile=3,sink=0,newest=0", 4)[0])
    assert some < more < every
    assert every == pytest.approx(1.0)


# --- many worlds


def test_intervals_cover():
    rng = np.random.default_rng(0)
    for n in (4, 8, 40):
        draws = rng.normal(3.0, 2.0, (1500, n))
        inside = [low <= 3.0 <= high for _, low, high in map(intervals.interval, draws)]
        assert 0.93 < np.mean(inside) < 0.97


def test_an_interval_leaves_out_what_is_no_number():
    assert intervals.interval([1.0, math.nan, 3.0])[0] == 2.0
    assert all(math.isnan(x) for x in intervals.interval([]))
    mean, low, high = intervals.interval([5.0])
    assert mean == 5.0 and math.isnan(low) and math.isnan(high)


def test_pairs_of_worlds_are_compared_one_by_one():
    a = {"by_world": {"x": [1.0, 11.0, 21.0, None]}}
    b = {"by_world": {"x": [0.0, 10.0, 20.0, 30.0]}}
    assert intervals.versus(a, b, "x") == (1.0, 1.0, 1.0)


# --- the model


@pytest.mark.slow
def test_what_is_made_never_depends_on_frames_after_the_given_ones(model):
    scene = scenes.make_scene(scenes.make_world(0, 3), ".qqqqq")
    noise = scene.frames.copy()
    noise[3:] = np.random.default_rng(0).integers(0, 255, noise[3:].shape)
    pair = [replace(scene, frames=x) for x in (scene.frames, noise)]
    (a,), (b,) = (batched_rollout.play(model, "dense", [one], 3) for one in pair)
    assert np.array_equal(a.frames, b.frames)
    assert len(a.frames) == 3


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dense", "cache=merge:budget=4f,heads=each"])
def test_worlds_in_one_batch_are_what_they_are_alone(model, plan):
    both = [scenes.make_scene(scenes.make_world(0, number), ".qqqqqw") for number in (3, 4)]
    together = batched_rollout.play(model, plan, both, 5, probed=(2,))
    for scene, found in zip(both, together, strict=True):
        (alone,) = batched_rollout.play(model, plan, [scene], 5, probed=(2,))
        # rows of one batch are summed up in another order
        assert psnr(alone.frames, found.frames).min() > 45
        assert found.work == pytest.approx(alone.work)
        for key, value in alone.cost.items():
            assert found.cost[key] == pytest.approx(value, rel=1e-3), key
        assert {"recall", "density", "cache_mb", "gmacs_frame"} <= set(found.cost)


@pytest.mark.slow
def test_a_batch_draws_what_a_rollout_of_its_own_draws(model):
    scene = scenes.make_scene(scenes.make_world(0, 3), ".qq")
    (found,) = batched_rollout.play(model, "dense", [scene], 1)
    chunks = rollout(
        model, "dense", frames=2, prompt=scene.world.prompt, actions="q q", seed=3,
        first=scene.frames[:1], first_actions=".",
        start=scene.world.view if model.camera else None,
    )  # fmt: skip
    assert np.array_equal(found.frames, np.concatenate([chunk.frames for chunk in chunks]))


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(world, "GIVEN", ".qq")
    monkeypatch.setattr(world, "QUICK_WALK", "qqw")
    monkeypatch.setattr(world, "OWN_WALK", "q" * 3)
    monkeypatch.setattr(judges, "FAR", range(1, 3))
    for module in (world, judges):
        monkeypatch.setattr(module, "TURN", 1)
    monkeypatch.setattr(world, "SETTLED", 1)


@pytest.mark.parametrize(
    "near, frames",
    [([60, 42, 30, 29.9, 35, 12], 3), ([60, 42], 2), ([], 0), ([60, math.nan, 50], 1), ([1.0], 0)],
)
def test_two_dense_runs_part_at_the_first_frame_below_30_db(near, frames):
    assert world.horizon(near) == frames


@pytest.mark.slow
def test_an_evaluation_has_the_rows_and_keys_it_promises(short, tmp_path, capsys):
    path = tmp_path / "found.json"
    words = ["atrium", "--only", "world", "--quick", "--worlds", "1", "--jobs", "1", "--runs", "2"]
    words += ["--plan", "dense", "--plan", "cache=window:budget=3f", "--json", str(path)]
    assert main(words) == 0
    found = json.loads(path.read_text())
    assert (found["schema"], found["suite"]) == (1, "atrium")
    keys = {"teacher_forced_db", "repeat_db", "pose_error", "identity", "revisit_db", "sharpness",
            "revisit_window_db", "prompt_right", "frozen", "revisit_own_db", "horizon",
            "floor_db"}  # fmt: skip
    assert keys <= set(found["world"])
    dense, window = found["rows"]
    assert dense["density"] == 1.0 and window["density"] < 1
    assert window["work_dense"] < 1 and window["cache_mb"] < dense["cache_mb"]
    # dense reads more with every frame, a full window the same
    assert window["work_spread"] == 1.0 < dense["work_spread"]
    # two runs draw other noise, and make other pictures of the same room
    assert 0 < dense["psnr_truth_band"] < 15
    assert "cache=window:budget=3f" in capsys.readouterr().out


@pytest.mark.slow
def test_recall_is_left_out_where_no_cache_tells_what_became_of_entries(short, monkeypatch, model):
    monkeypatch.setattr(world, "PROBED", (2,))
    asked = world.Request(("cache=window:budget=3f", "balanced"), frames=3, world=False)
    (played,) = world.play_worlds(model, asked, [0])
    window, bank = (take.cost for take in played.takes)
    assert 0 < window["recall"] <= 1 and "recall" not in bank and bank["host_mb"] > 0


@pytest.mark.slow
def test_judging_elsewhere_is_judging_here(short, model):
    asked = world.Request(("dense",), frames=3, quick=True, recall=False)
    alone = [world.judge_world(asked, world.play_worlds(model, asked, [n])[0]) for n in range(2)]
    together = [world.judge_world(asked, x) for x in world.play_worlds(model, asked, [0, 1])]
    for a, b in zip(alone, together, strict=True):
        assert a["world"].keys() == b["world"].keys()
        for key, value in a["world"].items():
            if math.isfinite(value):
                assert b["world"][key] == pytest.approx(value, abs=0.3), key


@pytest.mark.slow
def test_plans_by_several_processes_of_a_gpu_are_plans_played_together(short, model, tmp_path):
    """What a GPU's processes are given, a plan each, here by the CPU."""
    window = "cache=window:budget=3f"
    asked = world.Request((window, "dense"), frames=3, quick=True, recall=False)
    together = [world.judge_world(asked, x) for x in world.play_worlds(model, asked, [0, 1])]
    played, bad = [], [window]

    def play(tasks):
        for task, result in world_rows.play_tasks(None, "cpu", None, 2, 1, tasks):
            played.append((task.request.plans, task.request.world))
            yield task, RuntimeError("no memory") if task.request.plans[0] in bad else result

    path = tmp_path / "found.json"

    def measure(resume):
        parts = Parts(str(path), resume=resume)
        parts.begin("atrium", model.name, model.fingerprint)
        return list(world_rows._measure_plans(asked, 2, play, parts, None))

    with pytest.raises(RuntimeError, match="no memory"):
        measure(False)
    assert len(json.loads(path.read_text())["rows"]) == 1, "the other plan's values are kept"
    bad.clear()
    results = measure(True)
    dense = (("dense",), True)
    # dense is played again, for the window to be held against; the model itself is measured once
    assert played == [((window,), False), dense, (("dense",), False), ((window,), False)]
    assert [i for i, _ in results] == [0, 1]
    for i, part in results:
        assert part["rows"] == as_json([one["rows"][i] for one in together])
    assert results[0][1]["world"] == [{}, {}]
    assert results[1][1]["world"] == as_json([one["world"] for one in together])


def test_more_processes_share_a_gpu_where_they_need_not_take_turns(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert world_rows.players() == 2
    (tmp_path / "control").touch()
    assert world_rows.players() == 7


def as_json(value):
    return json.loads(to_json({"value": value}))["value"]


@pytest.mark.slow
def test_an_interrupted_evaluation_goes_on(short, tmp_path, monkeypatch, capsys):
    path, seen, measure = tmp_path / "found.json", [], world_rows._measure
    words = ["atrium", "--only", "world", "--quick", "--worlds", "2", "--jobs", "1", "--plans-only",
             "--plan", "cache=window:budget=3f", "--json", str(path)]  # fmt: skip

    def stopped(*given):
        seen.append(given[-1])
        if len(seen) == 2:
            raise KeyboardInterrupt
        return measure(*given)

    monkeypatch.setattr(world_rows, "_measure", stopped)
    assert main(words) == 130 and json.loads(path.read_text())["unfinished"]
    assert main([*words, "--seed", "1", "--resume"]) == 2
    assert "was measured with another seed (0, now 1)" in capsys.readouterr().err
    assert main([*words, "--resume"]) == 0 and seen == [0, 1, 1]
    (row,) = json.loads(path.read_text())["rows"]
    assert row["worlds"] == len(row["by_world"]["psnr_truth"]) == 2
    assert main([*words, "--resume"]) == 2
    assert "is finished: leave --resume out" in capsys.readouterr().err


def test_faults_are_one_line(capsys, tmp_path):
    assert main(["atrium", "--plan", "cache=nothing"]) == 2
    assert "no cache policy 'nothing'" in capsys.readouterr().err
    assert main(["atrium", "--frames", "4"]) == 2
    assert "frames must be 24 or more, a full turn, got 4" in capsys.readouterr().err
    assert main(["atrium", "--table", "all"]) == 2
    assert (
        "no table 'all'; there are: readme, papers, memory, budgets, matching, long, methods"
        in capsys.readouterr().err
    )
    save_wan(random_wan(WanConfig(dim=16, ffn_dim=16, layers=1, heads=2)), tmp_path)
    with pytest.raises(TachyscopeError, match="is no world model of Atrium"):
        world.world_models(str(tmp_path), "cpu")
    save_wan(toy_chunks(), tmp_path / "toy")  # with Atrium's actions, and no camera
    toy = ["--weights", str(tmp_path / "toy")]
    assert main(["atrium", "--pace", "0.5", "--only", "world", *toy]) == 2
    assert "is not told where its camera stands" in capsys.readouterr().err
    assert main(["atrium", "--pace", "0.4", "--only", "world"]) == 2
    assert "1 over a whole number, got 0.4" in capsys.readouterr().err
    assert main(["atrium", "--pace", "0.5", "--only", "tokens"]) == 2
    assert "of the world model's walks" in capsys.readouterr().err
    assert main(["somewhere"]) == 2
    assert "eval takes atrium, or two video files, got 'somewhere'" in capsys.readouterr().err
    assert main(["a.mp4", "b.mp4", "--worlds", "3"]) == 2
    assert "--worlds is of worlds, got two videos" in capsys.readouterr().err


@pytest.mark.slow
def test_named_walls_of_true_frames_are_right():
    found = []
    for number in (3, 4, 5):  # worlds that name walls beyond the first view
        scene = scenes.make_scene(
            scenes.make_world(0, number, motion=0.0), "." + "q" * 24, torch.device("cpu")
        )
        turn = range(1, 25)
        found += frame_checks.named_walls(scene.frames[1:], scene, turn)
        # as if every picture were the first: what is named lies elsewhere
        wrong = np.repeat(scene.frames[:1], 24, 0)
        assert all(right == 0 for _, right in frame_checks.named_walls(wrong, scene, turn))
    assert {side for side, _ in found} == {"left", "back", "right"}
    assert all(right == 1 for _, right in found)


@pytest.mark.slow
def test_first_views_are_told_by_side(capsys, tmp_path):
    target = tmp_path / "views.json"
    assert main(["atrium", "--only", "views", "--worlds", "4", "--json", str(target)]) == 0
    views = json.loads(target.read_text())["views"]
    assert len(views["by_world"]["right"]) == 4
    assert 0 <= views["right"] <= 1 and "right_back" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("pace", [1.0, 0.5])
def test_a_slower_walk_shows_the_same_in_more_frames(short, monkeypatch, pace):
    config = WanConfig(
        dim=32, ffn_dim=48, layers=2, heads=2, text_dim=8, text_len=256, size=(16, 16), chunk=1,
        stride=(1, 8, 8), actions=atrium.ACTIONS, camera=True, steps=(1000, 500), stock="dense",
    )  # fmt: skip
    model = random_wan(config)
    monkeypatch.setattr(
        type(model.decoder), "encode", lambda self, x: torch.zeros(1, 16, len(x), 16, 16)
    )
    times = round(1 / pace)
    asked = world.Request(
        ("dense", "cache=window:budget=3f"), frames=3 * times, quick=True, recall=False, own=True,
        pace=pace, runs=2,
    )  # fmt: skip
    (played,) = world.play_worlds(model, asked, [0])
    assert len(played.scene.frames) == 1 + 5 * times
    assert [len(take.frames) for take in played.takes] == [3 * times] * 2
    # every whole step ends where it ends at full pace
    plain = scenes.make_scene(scenes.make_world(0, 0), ".qqqqw")
    torch.testing.assert_close(played.scene.pose[::times], plain.pose)
    if pace == 1:
        assert np.array_equal(played.scene.frames, plain.frames)
    found = world.judge_world(asked, played)
    for row in (found["world"], *found["rows"]):
        assert math.isfinite(row["revisit_db"]) and math.isfinite(row["revisit_own_db"])
    assert found["rows"][0]["psnr_truth_band"] >= 0


def test_drift_is_told_by_stretches_of_the_rollout(monkeypatch):
    monkeypatch.setattr(judges, "STRETCH", 4)
    monkeypatch.setattr(judges, "FAR", range(1, 3))
    scene = scenes.make_scene(scenes.make_world(0, 3), ".qqqqqqqq")
    made = scene.frames[1:].copy()
    assert "stretch_4_db" in judges.judge(made, scene, 1)
    made[4:] = made[3]  # it stops after four frames
    found = judges.judge(made, scene, 1)
    assert (found["stretch_4_db"], found["frozen_4"], found["blurred_4"]) == (100.0, 0.0, 0.0)
    assert found["stretch_8_db"] < 30 and found["frozen_8"] == 1.0
    assert found["identity_stretch_4"] == 1.0 > found["identity_stretch_8"]
    short = replace(scene, actions=scene.actions[:5], frames=scene.frames[:5], pose=scene.pose[:5])
    assert "stretch_4_db" not in judges.judge(made[:4], short, 1)


def test_the_worst_world_is_told_where_more_is_better():
    found = intervals.combined(
        [
            {"loop_db": 20.0, "objects_new_place": 0.5, "frozen": 0.1, "identity_band": 0.2},
            {"loop_db": 12.0, "objects_new_place": math.nan, "frozen": 0.3, "identity_band": 0.1},
        ]
    )
    assert (found["loop_db_worst"], found["objects_new_place_worst"]) == (12.0, 0.5)
    assert not {"frozen_worst", "identity_band_worst"} & set(found)
