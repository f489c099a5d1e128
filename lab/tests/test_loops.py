"""The field's measures are what they say on true, still, blurred and made-up frames."""

import numpy as np
import pytest
import torch
from faults import refused

from tachyscope.measure import quality
from tachyscope.models.atrium import prompts
from tachyscope.models.atrium import world as atrium
from tachyscope_lab.cli.app import main as run_lab
from tachyscope_lab.evaluation import loops, scenes


def main(words):
    return run_lab(["eval", *words])


@pytest.fixture(scope="module")
def middle():
    return loops.in_the_middle(scenes.make_world(0, 4, motion=0.0))


def still(scene):
    return np.repeat(scene.frames[:1], len(scene.frames) - 1, 0)


def blurred(frames):
    return np.repeat(frames.mean((1, 2), keepdims=True).round().astype(np.uint8), 128, 1).repeat(
        128, 2
    )


@pytest.mark.parametrize("pace", [1.0, 0.25])
def test_every_loop_ends_where_it_began(pace):
    for number in range(6):
        start = loops.in_the_middle(scenes.make_world(0, number)).start
        for steps in (*loops.LOOPS.values(), ROUND):
            poses = atrium.walk(start, atrium.letters(scenes.spell(steps, pace))[None], pace)[0]
            off = poses[-1] - start[0]
            off[2] = (off[2] + 12) % 24 - 12
            assert off.abs().max() < 1e-4
            inside = poses[:, :2]
            assert inside.min() > atrium.NEAR + 0.01 and inside.max() < 1 - atrium.NEAR - 0.01


ROUND = loops.AWAY + "".join(loops.UNDONE[letter] for letter in reversed(loops.AWAY))


@pytest.fixture
def pixels_only(monkeypatch):
    """torchmetrics takes seconds to load."""
    for module in (quality, loops):
        monkeypatch.setattr(module, "has_ssim", lambda: False)


def test_a_loop_scores_where_it_moves_and_is_sharp(middle, pixels_only):
    scene = scenes.make_scene(middle, "." + loops.LOOPS["return"])
    found = loops.judge_loop("return", scene.frames[1:], scene)
    assert found == {"return_gate": 1.0, "return_db": 100.0}
    for dead in (still(scene), blurred(scene.frames[1:])):
        assert loops.judge_loop("return", dead, scene)["return_db"] == 0.0
    half = np.concatenate([still(scene)[:3], scene.frames[4:]])
    assert 0 < loops.judge_loop("return", half, scene)["return_gate"] < 1
    # moving and sharp, but not back where it was
    elsewhere = np.concatenate([scene.frames[1:-1], scene.frames[3:4]])
    assert loops.judge_loop("return", elsewhere, scene)["return_db"] < 25


def test_a_mirrored_way_back_is_the_way_there(middle, pixels_only):
    scene = scenes.make_scene(middle, ".wwq" + "ess")
    assert loops.judge_mirror(scene.frames[1:], scene)["mirror_db"] == 100.0
    assert loops.judge_mirror(still(scene), scene)["mirror_db"] == 0.0
    # a way of its own counts, where the way back is the same
    strange = np.concatenate([255 - scene.frames[1:-1], scene.frames[:1]])
    assert loops.judge_mirror(strange, scene)["mirror_db"] == 100.0


def test_a_replay_is_held_to_the_truth(middle, pixels_only):
    scene = scenes.make_scene(middle, ".qqqqww")
    assert loops.judge_replay(scene.frames[3:], scene, 3)["replay_db"] == 100.0
    frozen = np.repeat(scene.frames[2:3], 4, 0)
    assert loops.judge_replay(frozen, scene, 3)["replay_db"] == 0.0


@pytest.mark.slow
def test_a_switch_counts_walls_of_the_new_prompt_and_of_the_old():
    world, other = (scenes.make_world(0, n, motion=0.0) for n in (4, 504))
    painted = loops.repainted(world, other)
    assert (
        painted.prompt == prompts.descriptions(other.rooms, 0)[int(atrium.facing(world.start[0]))]
    )
    assert torch.equal(painted.start, world.start)
    old, new = (scenes.make_scene(w, "." + "qqq" * 8) for w in (world, painted))
    drawn = loops.judge_switch(new.frames[1:], old, new, 1)
    assert drawn["switch_follows"] > 0.9 and drawn["switch_stays"] < 0.5
    kept = loops.judge_switch(old.frames[1:], old, new, 1)
    assert kept["switch_follows"] < 0.5 and kept["switch_stays"] == 1.0


def test_ssim_needs_torchmetrics(middle, pixels_only):
    refused(
        lambda: quality.ssim(*[still(scenes.make_scene(middle, ".q"))] * 2),
        "pip install torchmetrics",
    )


@pytest.mark.slow
def test_ssim_is_one_for_equal_frames_and_falls(middle):
    frames = scenes.make_scene(middle, ".q").frames
    assert quality.ssim(frames, frames).tolist() == pytest.approx([1.0, 1.0], abs=1e-9)
    assert quality.ssim(frames[:1], frames[1:])[0] < 0.8
    scene = scenes.make_scene(middle, "." + loops.LOOPS["return"])
    found = loops.judge_loop("return", scene.frames[1:], scene)
    assert found["return_ssim"] == pytest.approx(1.0, abs=1e-9)
    assert loops.judge_loop("return", still(scene), scene)["return_ssim"] == 0.0


@pytest.mark.slow
def test_a_plan_is_measured_in_loops(tmp_path, capsys):
    command = ["atrium", "--only", "loops", "--worlds", "1", "--plan", "dense", "--jobs", "1"]
    assert main([*command, "--json", str(tmp_path / "loops.json")]) == 0
    out = capsys.readouterr().out
    assert "mirror" in out and "follows" in out
