"""Noise can be handed in: that of a seed makes the seed's video."""

import numpy as np
import pytest
import torch
import toys
from faults import refused
from safetensors.torch import save_file

import tachyscope as ts
from tachyscope.measure.compare import compare
from tachyscope.models.wan.config import WanConfig
from tachyscope.models.wan.context import Rolling
from tachyscope.models.wan.model import WanModel
from tachyscope.models.wan.random import random_wan

SMALL = {"dim": 48, "ffn_dim": 64, "layers": 2, "heads": 2, "text_dim": 8, "text_len": 16,
         "in_channels": 4, "size": (4, 4), "stride": (1, 8, 8)}  # fmt: skip
CONFIGS = {
    "plain": WanConfig(**SMALL),
    "first steps": WanConfig(**SMALL, first_steps=(1000, 250), steps=(1000, 750, 500)),
    "rolling": WanConfig(**SMALL, context=Rolling(), chunk=2),
}


def _model(kind):
    return random_wan(CONFIGS[kind], name=kind)


def _video(model, frames=9, **asked):
    return np.concatenate([c.frames for c in ts.rollout(model, frames=frames, **asked)])


def _noise_of_seed(monkeypatch, model, seed, **asked):
    """What a seed draws, as a tensor to hand in, and the video."""
    drawn, own, chunk = {}, WanModel.noise, model.config.chunk

    def noted(self, session, draw, ahead=0):
        found = own(self, session, draw, ahead)
        drawn[draw, session.memory.made // chunk + ahead] = found[0].transpose(0, 1)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(WanModel, "noise", noted)
        video = _video(model, seed=seed, **asked)
    draws, chunks = (1 + max(key[i] for key in drawn) for i in (0, 1))
    missing = torch.zeros_like(drawn[0, 0])
    rows = [[drawn.get((i, j), missing) for j in range(chunks)] for i in range(draws)]
    return torch.stack([torch.cat(row) for row in rows]), video


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_noise_of_a_seed_makes_the_video_of_the_seed(kind, monkeypatch):
    model = _model(kind)
    # a change begins a rolling window again, and with it the noise of the chunks under way
    then = [] if kind == "rolling" else [(4, "b")]
    noise, want = _noise_of_seed(monkeypatch, model, 3, then=then)
    assert len(noise) == model.draws
    assert np.array_equal(_video(model, seed=8, noise=noise, then=then), want)
    assert np.array_equal(_video(model, noise=noise.numpy(), then=then), want)
    assert not np.array_equal(_video(model, seed=8, then=then), want)
    assert not np.array_equal(_video(model, noise=noise + 0.5, then=then), want)


def test_plans_are_compared_from_noise_that_is_handed_in(monkeypatch):
    model, shown = _model("plain"), []
    noise, want = _noise_of_seed(monkeypatch, model, 3)
    compare(
        model, ["dense"], frames=9, seed=8, noise=noise, aa=False,
        watch=lambda name, chunk: shown.append(chunk.frames),
    )  # fmt: skip
    assert np.array_equal(np.concatenate(shown), want)


def test_draws_that_are_not_given_come_from_the_seed(monkeypatch):
    model = _model("plain")
    noise, _ = _noise_of_seed(monkeypatch, model, 3)
    one, again, other = (_video(model, seed=s, noise=noise[:1]) for s in (1, 1, 2))
    assert np.array_equal(one, again) and not np.array_equal(one, other)


@pytest.mark.slow
def test_noise_is_that_of_generated_frames_and_goes_on_with_the_session(monkeypatch):
    model = ts.load("atrium-world")
    first = np.zeros((2, 128, 128, 3), np.uint8)
    asked = {"frames": 3, "first": first}
    noise, want = _noise_of_seed(monkeypatch, model, 1, **asked)
    assert noise.shape[1] == 3
    session = toys.open_session(model, first=first, noise=noise)
    made = _video(model, 1, stream=ts.Stream(model, session))
    state = session.state()
    fresh = toys.open_session(model, first=first, noise=noise)
    fresh.restore(state)
    assert np.array_equal(
        np.concatenate([made, _video(model, 2, stream=ts.Stream(model, fresh))]), want
    )
    refused(lambda: toys.open_session(model, first=first).restore(state), "with other noise")
    refused(
        lambda: ts.rollout(model, frames=1, stream=ts.Stream(model, fresh)),
        "the 4 latent frames to be made, got 3",
    )
    refused(
        lambda: ts.rollout(model, frames=1, stream=ts.Stream(model, session), noise=noise + 1),
        "another noise",
    )


def test_a_fault_in_noise_is_told_when_rollout_is_called(tmp_path):
    model = _model("plain")
    good = torch.zeros(4, 9, 4, 4, 4)
    shape = "`noise` must be floats [1 to 4, latent frames, 4, 4, 4], got Tensor of torch."
    save_file({"other": good}, tmp_path / "other.safetensors")
    for noise, words in [
        (good[0], shape + "float32 [9, 4, 4, 4]: the first dimension counts the draws of a chunk"),
        (torch.zeros(5, 9, 4, 4, 4), shape + "float32 [5, 9, 4, 4, 4]"),
        (good[:0], shape + "float32 [0, 9, 4, 4, 4]"),
        (good[..., :3], shape),
        (good.long(), shape + "int64"),
        (good / 0, "`noise` must be finite, this has NaN or infinity: draw it again"),
        (good[:, :8], "`noise` must be for the 9 latent frames to be made, got 8: give more"),
        ([0.0], "`noise` must be a path, or an array or a tensor of floats, got a list"),
        (np.zeros(3, int), "got ndarray of int64 [3]"),
        (tmp_path / "none.safetensors", "no checkpoint file"),
        (tmp_path / "other.safetensors", "must hold a tensor 'noise', it has other: save it"),
    ]:
        refused(lambda noise=noise: ts.rollout(model, frames=9, noise=noise), words)
    assert len(_video(model, noise=good.bfloat16())) == 9
    tokens = ts.load("toy-tokens")
    refused(
        lambda: ts.rollout(tokens, frames=1, noise=good),
        "toy-tokens is not made from noise that could be handed in: leave `noise` out",
    )


def test_noise_that_ends_in_an_open_session_is_one_line():
    model = _model("plain")
    session = toys.open_session(model, noise=torch.zeros(1, 3, 4, 4, 4))
    with torch.inference_mode():
        model.sample(session, ())
        session.commit()
        refused(
            lambda: model.sample(session, ()),
            "`noise` was given for 3 latent frames, and this chunk needs 6",
        )
