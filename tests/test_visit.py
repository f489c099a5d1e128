import numpy as np
import pytest
import toys

import tachyscope as ts
from tachyscope import weights
from tachyscope.core.arguments import parse_actions
from tachyscope.core.errors import TachyscopeError
from tachyscope.measure.quality import psnr
from tachyscope.models.atrium.visit import Visit

TURN = "q*24"


@pytest.fixture(scope="module")
def world():
    return ts.load("atrium-world")


def test_a_full_turn_shows_the_first_frame_again():
    visit = Visit(3, [5] * 24, motion=0.0)
    frames = visit.frames(0, len(visit))
    assert frames.shape == (25, 128, 128, 3) and frames.dtype == np.uint8
    assert psnr(frames[24:], frames[:1])[0] > 60
    assert psnr(frames[12:13], frames[:1])[0] < 20


def test_a_part_of_a_visit_is_that_part_of_the_whole():
    visit = Visit(5, [1, 5, 5, 2])
    assert np.array_equal(visit.frames(2, 4), visit.frames(0, 5)[2:4])


def test_things_move_at_a_tempo_of_their_own():
    """In room 1000000005 something moves in view; after a whole period it is where it was."""
    quick = Visit(1_000_000_005, [0] * 32, pace=1 / 30, tempo=0.5)
    slow = Visit(1_000_000_005, [0] * 32, pace=1 / 30)
    first = quick.frames(0, 1)
    assert np.array_equal(first, slow.frames(0, 1))
    assert psnr(quick.frames(32, 33), first)[0] > 60
    assert psnr(quick.frames(8, 9), first)[0] < psnr(slow.frames(8, 9), first)[0] - 3


def test_a_world_is_a_number():
    with pytest.raises(TachyscopeError, match="a world is a number from 0"):
        Visit(-1, [])


def test_given_frames_are_gone_on_from(world):
    """The first new frame of a standing camera shows what was given."""
    visit = Visit(11, [0] * 3, motion=0.0)
    chunks = ts.rollout(
        world, frames=2, prompt=visit.prompt, first=visit.frames(0, 1),
        start=visit.view if world.camera else None,
    )  # fmt: skip
    video = np.concatenate([chunk.frames for chunk in chunks])
    assert (psnr(video, visit.frames(1, 3)) > 24).all()


def test_given_frames_count_as_frames_of_the_video(world):
    visit = Visit(11, [5] * 3)
    session = toys.open_session(
        world, prompt=visit.prompt, first=visit.frames(0, 3), first_actions=". q q", frames=2
    )
    assert session.memory.latent_frame == 3 and session.memory.past == 3 * 64
    assert session.memory.layers[0].k.shape[2] == 5 * 64


def test_a_model_that_cannot_encode_says_so():
    with pytest.raises(TachyscopeError, match="a preview shows latents and cannot make them"):
        toys.open_session(ts.load("toy-chunks"), first=np.zeros((1, 64, 96, 3), np.uint8))


@pytest.mark.slow
def test_the_world_model_remembers_what_a_short_window_forgets(world):
    """A full turn and back to the start: dense memory finds it, a window of 8 frames does not."""
    moves = parse_actions(TURN, world.actions, 24)
    visit = Visit(1_000_000_002, moves, motion=0.0)
    found = {}
    for plan in ("dense", "cache=window:budget=9f,sink=0"):
        chunks = ts.rollout(
            world, plan, frames=24, prompt=visit.prompt, actions=TURN, first=visit.frames(0, 1),
            start=visit.view if world.camera else None,
        )  # fmt: skip
        *_, last = chunks
        found[plan] = psnr(last.frames, visit.frames(24, 25))[0]
    assert found["dense"] > 20
    assert found["dense"] > found["cache=window:budget=9f,sink=0"] + 3


def test_a_shipped_file_that_was_changed_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "HERE", tmp_path)
    (tmp_path / "atrium-world").mkdir()
    (tmp_path / "atrium-world" / "config.json").write_text("{}")
    with pytest.raises(TachyscopeError, match="is missing or not the file that was shipped"):
        weights.shipped("atrium-world")


def test_all_shipped_weights_fit_into_44_megabytes():
    files = [path for path in weights.HERE.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 44e6
