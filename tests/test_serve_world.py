"""A session in a world by number: shown around first, its camera told, its walls checked."""

import base64
import io
import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from PIL import Image
from serving import make_engine, playing, serving, tiny

import tachyscope as ts
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.given import give
from tachyscope.models.atrium.visit import Visit
from tachyscope.serve.action_log import GIVEN_MOST, Opening
from tachyscope.serve.lane import LOOK, TOUR

WORLD, ACTIONS = 3, "qqe"


@pytest.fixture(scope="module")
def model():
    return ts.load("atrium-world")


@pytest.fixture
def engine(model, tmp_path):
    return make_engine(model, tmp_path, name="atrium-world", plan="pose")


def walked(letters):
    return Visit(WORLD, " ".join(letters))


def a_log(engine, steps, given):
    return {"version": 1, "model": "atrium-world", "weights": engine.model.fingerprint,
            "opening": {"plan": "pose", "prompt": "", "seed": 0, "world": WORLD, "given": given},
            "steps": list(steps)}  # fmt: skip


@pytest.mark.slow
def test_frames_given_step_by_step_are_remembered_as_those_that_a_stream_opens_with(engine, model):
    given = "qqw"
    visit = walked(given)
    with (
        serving(engine) as client,
        playing(client, log=a_log(engine, given + ACTIONS, 3)) as player,
    ):
        player.until("chunk", chunk=len(given + ACTIONS) - 1)
        chunks = [player.chunks[1, i] for i in range(len(given + ACTIONS))]
    with ts.open(
        model, "pose", prompt=visit.prompt, start=visit.view, first=visit.frames(0, 4),
        first_actions=". q q w",
    ) as stream:  # fmt: skip
        made = [stream.step(action).frames[0] for action in ACTIONS]
    assert player.matches([*visit.frames(1, 4), *made])
    assert [one["given"] for one in chunks] == [True] * 3 + [False] * 3
    x, y, degrees = chunks[1]["pose"]
    assert (x, y) == pytest.approx(visit.view[:2], abs=1e-3)
    assert degrees == pytest.approx((visit.view[2] + 30) % 360)
    assert chunks[-1]["pose"] in chunks[-1]["read"]  # it stood there before, and reads what it saw
    # told before the picture, and again with the chunk
    poses = [one for one in player.said if one["type"] == "pose"]
    assert [(one["chunk"], one["pose"], one["given"]) for one in poses] == [
        (one["chunk"], one["pose"], one["given"]) for one in chunks
    ]


@pytest.mark.slow
def test_a_look_around_comes_first_and_then_the_walls_are_checked(engine):
    with serving(engine) as client, playing(client, world=WORLD, look=True) as player:
        assert player.opened["given"] == len(LOOK)
        assert player.opened["script"] == len(LOOK + TOUR)
        player.until("chunk", chunk=len(LOOK) - 1)
        player.send("pause")
        player.until("receipt", phase="applied")
        player.send("keys", actions="q")
        player.send("pause", paused=False)
        last = player.until("chunk", given=False)
        while last["pose"][2] % 90:
            last = player.until("chunk")
        player.send("check", id=7)
        walls = player.until("check", id=7)["walls"]
        player.send("log")
        log = player.until("log")["log"]
    letters = [step or "." for step in log["steps"]]
    assert "".join(letters[: len(LOOK)]) == LOOK
    wall = next(one for one in walls if one["chunk"] == last["chunk"])
    assert wall["wall"] == last["pose"][2] // 90 and wall["right"] is True
    truth, made = (
        np.asarray(Image.open(io.BytesIO(base64.b64decode(wall[name]))))
        for name in ("truth", "made")
    )
    wanted = walked(letters).frames(last["chunk"] + 1, last["chunk"] + 2)[0]
    assert np.abs(truth.astype(int) - wanted).mean() < 4
    assert np.abs(made.astype(int) - player.frames[0, 1, last["frame"]]).mean() < 4


@pytest.mark.slow
def test_a_window_walks_along_and_its_walls_are_checked_too(engine):
    given, made = "qq", "q" * 6  # six steps face one wall straight on
    log = a_log(engine, given + made, len(given))
    with serving(engine) as client, playing(client, log=log) as player:
        player.until("chunk", chunk=len(given + made) - 1)
        player.send("pause")
        player.send("beside", mode="follow", plan="cache=window:budget=3f")
        player.until("beside", chunk=len(given + made) - 1)
        player.send("check")
        told = player.until("check")
        assert engine.pool.reserved == sum(
            map(engine.pool.bytes_of, ("pose", "cache=window:budget=3f"))
        )
        player.send("beside", mode="follow", plan="live")  # in place of the other
        player.until("beside", chunk=0)
        assert engine.pool.reserved == sum(map(engine.pool.bytes_of, ("pose", "live")))
        player.send("beside", id=9, mode="follow", plan="none such")
        assert "no plan" in player.until("receipt", id=9, phase="refused")["reason"]
    (own,), (beside,) = told["walls"], told["beside"]
    assert len(given) <= own["chunk"] == beside["chunk"] and own["truth"] == beside["truth"]


def test_a_wall_of_another_colour_or_without_its_thing_is_wrong():
    visit = walked("q" * 23)
    true, bare = visit.frames(0, 24), walked("q" * 23)
    bare.rooms = replace(bare.rooms, thing=torch.zeros_like(bare.rooms.thing))
    right = visit.walls_right(true, 0)
    assert (right[~right.isnan()] == 1).all()
    assert (visit.walls_right(255 - true, 0)[~right.isnan()] == 0).all()
    without = visit.walls_right(bare.frames(0, 24), 0)
    assert 0 < (without == 0).sum() < (without == 1).sum()


def test_a_world_without_steps_of_a_whole_frame_cannot_be_looked_around(tmp_path):
    with serving(make_engine(tiny(), tmp_path)) as client, playing(client) as player:
        player.send("reset", look=True)
        assert "leave look out" in player.until("receipt", phase="refused")["reason"]
        player.send("check")
        assert player.until("check")["walls"] == []


def test_a_log_tells_its_given_steps_and_older_logs_have_none(engine):
    log = a_log(engine, "qw", 1)
    whole = log | {"opening": asdict(Opening(**log["opening"]))}
    assert json.loads(json.dumps(engine.pool.read_log(log).to_json())) == whole
    del log["opening"]["given"]
    assert engine.pool.read_log(log).opening.given == 0
    for given in (-1, GIVEN_MOST + 1, True, "1"):
        with pytest.raises(TachyscopeError, match="an action log's given"):
            engine.pool.read_log(a_log(engine, "qw", given))
    log = a_log(engine, "qw", 1)
    log["opening"]["world"] = None
    with pytest.raises(TachyscopeError, match="leave look out"):
        engine.pool.read_log(log)


def test_given_frames_are_as_many_as_a_chunk_has(model):
    visit = walked("q")
    with ts.open(model, "live", prompt=visit.prompt, first=visit.frames(0, 1)) as stream:
        with pytest.raises(TachyscopeError, match="a chunk has 1 frames, got 2"):
            give(stream, visit.frames(0, 2))
        assert give(stream, visit.frames(1, 2), "q").index == 1
        assert stream.step("q").index == 2
