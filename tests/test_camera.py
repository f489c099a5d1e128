"""A model that is told where its camera stands: poses follow from the start, the pace and actions."""

import dataclasses

import numpy as np
import pytest
import torch
from faults import refused

import tachyscope
from tachyscope.core.rollout import rollout
from tachyscope.models.atrium import camera
from tachyscope.models.atrium import world as atrium
from tachyscope.models.toys import toy_chunks
from tachyscope.models.wan.config import WanConfig
from tachyscope.models.wan.random import random_wan
from tachyscope_lab.evaluation import batched_rollout, scenes

CONFIG = WanConfig(
    dim=32, ffn_dim=48, layers=2, heads=2, text_dim=8, text_len=64, size=(4, 4), stride=(1, 8, 8),
    chunk=1, actions=atrium.ACTIONS, camera=True, steps=(1000, 500), stock="dense",
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return random_wan(CONFIG)


def frames(model, **asked):
    asked = {"frames": 6, "actions": "q q w w e e", "prompt": "a", **asked}
    return np.concatenate([chunk.frames for chunk in rollout(model, **asked)])


def standing(stream):
    return stream.session.memory.features.camera


def test_the_camera_takes_the_walk_that_the_truth_takes(model):
    world = scenes.make_world(0, 5)
    scene = scenes.make_scene(world, ".qqqwwadse", pace=0.5)
    stream = tachyscope.open(model, start=world.view, pace=0.5)
    for letter in scene.actions:
        stream.step(letter)
    true = atrium.seen_from(scene.pose[-1], atrium.facing(scene.pose[0]))
    torch.testing.assert_close(standing(stream)[0], torch.tensor([*true, 0.5]))
    assert stream.pace == 0.5


def test_frames_hang_on_the_start_and_the_pace(model):
    plain = frames(model)
    assert np.array_equal(plain, frames(model, start=camera.START, pace=1.0))
    for other in ({"start": (0.3, 0.5, 0.0)}, {"start": (0.5, 0.5, 90.0)}, {"pace": 0.5}):
        assert not np.array_equal(plain, frames(model, **other))
    # the first frame comes after a turn: a full one is none
    assert np.array_equal(plain, frames(model, start=(0.5, 0.5, 360.0)))


def test_a_video_of_a_batch_is_the_one_made_alone(model):
    starts = [(0.3, 0.4, 15.0), (0.7, 0.6, 200.0)]
    both = [
        chunk.frames
        for chunk in rollout(
            model, frames=4, actions="q w d q", seed=[1, 2], start=starts, pace=0.5
        )
    ]
    for i, start in enumerate(starts):
        alone = frames(
            model, frames=4, actions="q w d q", seed=i + 1, start=start, pace=0.5, prompt=""
        )
        assert np.abs(np.concatenate(both, 1)[i].astype(int) - alone).max() <= 1


def test_a_state_carries_where_the_camera_stands(model):
    a = tachyscope.open(model, start=(0.4, 0.4, 30.0), pace=0.25)
    for letter in "qww":
        a.step(letter)
    state = a.snapshot()
    b = tachyscope.open(model)
    b.restore(state)
    assert torch.equal(standing(a), standing(b))
    for letter in "dqq":
        assert np.array_equal(a.step(letter).frames, b.step(letter).frames)
    b.restore(state)  # what was walked since is undone
    assert not torch.equal(standing(a), standing(b))
    lacking = {name: x for name, x in state.items() if name != "features.camera"}
    refused(lambda: b.restore(lacking), "lacks")


def test_a_new_prompt_is_taken_up_where_the_camera_stands(model):
    def begun():
        stream = tachyscope.open(model, prompt="a", start=(0.4, 0.4, 30.0), pace=0.5)
        made = [stream.generate([atrium.ACTIONS.index(letter)]) for letter in "qwqe"]
        return stream, torch.cat([x.latents for x in made], model.frame_dim)

    a, _ = begun()
    a.set_prompt("b")
    first = a.step("w").frames
    b, latents = begun()
    b.refill(latents, "b", "q w q e", start=(0.4, 0.4, 30.0))
    assert np.array_equal(first, b.step("w").frames)
    assert torch.equal(standing(a), standing(b))
    c, _ = begun()
    c.refill(latents, "b", "q w q e", start=(0.6, 0.4, 30.0))
    assert not np.array_equal(first, c.step("w").frames)


def test_a_prompt_that_is_set_before_the_first_chunk_leaves_the_start(model):
    a = tachyscope.open(model, prompt="a", start=(0.3, 0.3, 45.0))
    a.set_prompt("b")
    b = tachyscope.open(model, prompt="b", start=(0.3, 0.3, 45.0))
    assert np.array_equal(a.step("w").frames, b.step("w").frames)


def test_a_frame_from_the_true_past_is_made_where_the_walk_is(monkeypatch):
    wide = random_wan(dataclasses.replace(CONFIG, size=(16, 16), text_len=256))
    monkeypatch.setattr(
        type(wide.decoder), "encode", lambda self, x: torch.zeros(1, 16, len(x), 16, 16)
    )
    opened = []
    real = batched_rollout.open_scenes
    monkeypatch.setattr(
        batched_rollout, "open_scenes", lambda *a, **k: opened.append(real(*a, **k)) or opened[-1]
    )
    scene = scenes.make_scene(scenes.make_world(0, 1), ".qqww")
    batched_rollout.teacher_forced(wide, [scene], 2, [2, 3, 4])
    true = atrium.seen_from(scene.pose[-1], atrium.facing(scene.pose[0]))
    torch.testing.assert_close(standing(opened[0])[0, :3], true)


def test_faults_are_told_at_the_door(model):
    toy = toy_chunks()
    refused(lambda: tachyscope.open(toy, pace=0.5), "toy-chunks", "`pace`", "leave it out")
    refused(lambda: tachyscope.open(toy, start=camera.START), "`start`", "leave it out")
    refused(lambda: tachyscope.open(model, pace=2.0), "`pace`", "got 2.0")
    for wrong in ((0.1, 0.5, 0.0), (0.5, 0.5), "middle", (0.5, 0.5, float("nan"))):
        refused(lambda wrong=wrong: tachyscope.open(model, start=wrong), "(x, y, degrees)")
    refused(lambda: tachyscope.open(model, seed=[1, 2], start=[camera.START]), "here 2, got 1")
    refused(lambda: tachyscope.open(model, size=(64, 64)), "32x32 alone", "leave `size` out")
    stream = tachyscope.open(model, pace=0.1)
    refused(lambda: rollout(model, frames=2, stream=stream, start=camera.START), "another start")
    refused(lambda: rollout(model, frames=2, stream=stream, pace=0.2), "another pace")
    assert next(rollout(model, frames=2, stream=stream, pace=0.1)).frames.shape[0] == 1
    refused(lambda: WanConfig(camera=True), "camera needs actions")
