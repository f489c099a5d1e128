import dataclasses
import re
import sys

import numpy as np
import pytest
import torch
import toys

import tachyscope as ts
from tachyscope.core.arguments import parse_actions
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.plan import NAMES
from tachyscope.core.rollout import change_frames
from tachyscope.core.session_state import SessionSpec
from tachyscope.models.wan.random import random_wan

MODELS = ["toy-chunks", "toy-tokens"]
PLANS = {
    "toy-chunks": "cache=merge:budget=8f attention=ann:read=0.5 text=ann replay=attentive:share=0.5",
    "toy-tokens": "cache=merge:budget=5f attention=ann:read=0.8 replay=attentive:share=0.5",
}


# three chunks, or as many frames as fill the cache of the plan above
FRAMES = {"toy-chunks": 9, "toy-tokens": 5}


def _video(model, plan="dense", frames=None, **kwargs):
    frames = frames or FRAMES[model.name]
    chunks = ts.rollout(model, plan, frames=frames, prompt="a red room", actions="w*3 q", **kwargs)
    return np.concatenate([chunk.frames for chunk in chunks])


@pytest.fixture(params=MODELS)
def model(request):
    return toys.load(request.param)


# with the slower toy in the slow tests alone
MOSTLY_CHUNKS = pytest.mark.parametrize(
    "model", ["toy-chunks", pytest.param("toy-tokens", marks=pytest.mark.slow)], indirect=True
)


@pytest.mark.parametrize(
    "model, plan",
    [
        pytest.param(
            name,
            plan,
            marks=pytest.mark.slow
            if name == "toy-tokens" and plan not in ("dense", "fast", "fastcar")
            else (),
        )
        for name in MODELS
        for plan in NAMES
    ],
    indirect=["model"],
)
def test_every_named_plan_plays(model, plan):
    video = _video(model, plan)
    assert video.dtype == np.uint8 and video.shape[0] == FRAMES[model.name] and video.shape[3] == 3
    assert video.std() > 5, "a flat picture shows nothing"


@MOSTLY_CHUNKS
def test_the_same_seed_gives_the_same_video_and_another_seed_another(model):
    assert np.array_equal(_video(model), _video(model))
    assert not np.array_equal(_video(model), _video(model, seed=1))


def test_a_rollout_yields_each_chunk_when_it_is_made(model):
    chunks = ts.rollout(model, frames=9)
    first = next(chunks)
    assert first.index == 0 and len(first.frames) == model.shape().chunk
    assert first.stats["chunk_ms"] > 0
    chunks.close()
    assert not torch.is_inference_mode_enabled()


@MOSTLY_CHUNKS
def test_the_last_chunk_is_cut_to_the_frames_asked_for(model):
    for frames in (1, 4, 7):
        assert len(_video(model, frames=frames)) == max(frames, 4) if frames > 3 else True
    assert len(np.concatenate([c.frames for c in ts.rollout(model, frames=5)])) == 5


@MOSTLY_CHUNKS
def test_a_second_video_is_what_a_fresh_model_gives(model):
    plan = PLANS[model.name]
    _video(model, plan, seed=3)
    again = _video(model, plan, seed=4)
    assert np.array_equal(again, _video(toys.load(model.name), plan, seed=4))


@MOSTLY_CHUNKS
def test_interleaved_sessions_give_what_each_alone_gives(model):
    plan = PLANS[model.name]
    alone = [_video(toys.load(model.name), p, seed=s) for p, s in ((plan, 1), ("dense", 2))]
    streams = [
        ts.rollout(
            model, p, frames=FRAMES[model.name], prompt="a red room", actions="w*3 q", seed=s
        )
        for p, s in ((plan, 1), ("dense", 2))
    ]
    together = [[], []]
    for a, b in zip(*streams, strict=True):
        together[0].append(a.frames)
        together[1].append(b.frames)
    for got, want in zip(together, alone, strict=True):
        assert np.array_equal(np.concatenate(got), want)


def test_another_size_then_the_first_again():
    model = ts.load("toy-chunks")
    first = _video(model)
    small = _video(model, size=(32, 64))
    assert small.shape[1:3] == (32, 64)
    assert np.array_equal(small, _video(ts.load("toy-chunks"), size=(32, 64)))
    assert np.array_equal(_video(model), first)


def test_a_session_leaves_the_model_bit_identical(model):
    before = {name: x.clone() for name, x in model.transformer.state_dict().items()}
    _video(model, PLANS[model.name])
    after = model.transformer.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_stream_goes_on_from_its_state(model, tmp_path):
    from safetensors.torch import load_file, save_file

    plan, frames = PLANS[model.name], FRAMES[model.name]
    whole = _video(model, plan, frames=2 * frames)
    session = toys.open_session(model, plan, prompt="a red room")
    head = [
        c.frames
        for c in ts.rollout(model, frames=frames, actions="w*3 q", stream=ts.Stream(model, session))
    ]
    save_file(session.state(), tmp_path / "state.safetensors")
    fresh = toys.open_session(model, plan, prompt="a red room", seed=5)
    fresh.restore(load_file(tmp_path / "state.safetensors"))
    tail = [c.frames for c in ts.rollout(model, frames=frames, stream=ts.Stream(model, fresh))]
    assert np.array_equal(np.concatenate(head + tail), whole)


def test_refilling_with_its_own_latents_changes_nothing(model):
    """Clean passes over what was made leave the same keys: the next chunk is the same."""

    def run(refilled):
        session = toys.open_session(model, "dense", prompt="a red room")
        latents = []
        for _ in ts.rollout(
            model, frames=2 * session.shape.chunk, stream=ts.Stream(model, session)
        ):
            latents.append(session.memory.latents)
        if refilled:
            ts.Stream(model, session).refill(torch.cat(latents, model.frame_dim), "a red room")
        more = ts.rollout(model, frames=session.shape.chunk, stream=ts.Stream(model, session))
        return next(more).frames.astype(int)

    assert np.abs(run(True) - run(False)).max() <= 1


def test_a_refill_goes_on_with_the_noise(model):
    """Neither the video's noise nor a policy's draws begin again."""
    session = toys.open_session(model, "replay=random:share=0.5", frames=30)
    list(ts.rollout(model, frames=9, stream=ts.Stream(model, session)))
    before = [x.get_state() for x in (session.generators[0], session.memory.policy_rng)]
    coming = session.memory.latent_frames - session.memory.latent_frame
    ts.Stream(model, session).refill(session.memory.latents, "")
    after = [x.get_state() for x in (session.generators[0], session.memory.policy_rng)]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    session.reset()
    fresh = [x.get_state() for x in (session.generators[0], session.memory.policy_rng)]
    assert not any(torch.equal(*pair) for pair in zip(before, fresh, strict=True))
    assert session.memory.latent_frames - coming == session.shape.chunk, (
        "as much is to come as before"
    )


def _changed(model, plan, held, first=None):
    """A video by hand: some frames, the newest `held` chunks remembered anew, and as many more."""
    count = FRAMES[model.name]
    session = toys.open_session(
        model, plan, prompt="a red room", frames=2 * count, first=first, seed=2
    )
    parts, moves, frames = [], [], []
    if session.memory.latents is not None:
        parts.append(session.memory.latents)
        moves += ["."] * session.memory.latents.shape[model.frame_dim]
    before, after = _actions(count)
    for chunk in ts.rollout(
        model, frames=count, actions=" ".join(before), stream=ts.Stream(model, session)
    ):
        frames.append(chunk.frames)
        parts.append(session.memory.latents)
    moves += before
    kept = torch.cat(parts[-held:], model.frame_dim)
    actions = " ".join(moves[-kept.shape[model.frame_dim] :])
    ts.Stream(model, session).refill(kept, "a blue room", actions)
    more = ts.rollout(
        model, frames=count, actions=" ".join(after), stream=ts.Stream(model, session)
    )
    frames += [c.frames for c in more]
    return np.concatenate(frames)


def _actions(count):
    """Those of so many frames, and of all but one of as many again."""
    return ["w"] + ["q"] * (count - 1), ["e"] * (count - 1)


def _changed_asked(model):
    count = FRAMES[model.name]
    before, after = _actions(count)
    actions = " ".join([*before, *after])
    return {"prompt": "a red room", "frames": 2 * count, "actions": actions, "seed": 2}


@pytest.mark.parametrize(
    "model, bounded",
    [
        ("toy-chunks", False),
        ("toy-chunks", True),
        ("toy-tokens", True),
        pytest.param("toy-tokens", False, marks=pytest.mark.slow),
    ],
    indirect=["model"],
)
def test_a_prompt_that_changes_remembers_what_the_cache_has_room_for(model, bounded):
    chunk = model.shape().chunk
    # of those frames, all; or two chunks, beside a prompt that is held with them
    budget = 2 * chunk + model.shape().token_by_token
    plan = f"cache=window:budget={budget}f,sink=0" if bounded else "dense"
    want, asked = _changed(model, plan, 2 if bounded else 9), _changed_asked(model)
    count = FRAMES[model.name]
    got = list(ts.rollout(model, plan, **asked, then=[(count - chunk + 1, "a blue room")]))
    assert np.array_equal(np.concatenate([c.frames for c in got]), want)
    assert [c.index for c in got] == list(range(len(got)))
    plain = [c.frames for c in ts.rollout(model, plan, **asked)]
    same = (np.concatenate(plain) == want).all((1, 2, 3))
    assert same[:count].all() and not same[count:].all()


@pytest.mark.slow
def test_given_frames_are_remembered_again_too():
    model = toys.load("toy-tokens")
    first = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), np.uint8)
    want, asked = _changed(model, "dense", 9, first), _changed_asked(model)
    chunks = ts.rollout(model, **asked, first=first, then=[(5, "a blue room")])
    assert np.array_equal(np.concatenate([c.frames for c in chunks]), want)


def test_a_cache_that_the_memory_does_not_hold_is_one_line(model, monkeypatch):
    def full(*given):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")

    monkeypatch.setattr(SessionSpec, "empty_layer", full)
    with pytest.raises(TachyscopeError) as fault:
        toys.open_session(model, "dense", frames=9)
    said = str(fault.value)
    assert said.startswith("the memory of cpu does not hold the cache of cache=keep_all")
    assert "budget=21f" in said and "\n" not in said
    monkeypatch.setattr(SessionSpec, "empty_layer", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        toys.open_session(model, "dense", frames=9)


class Afterglow:
    """Stands in for a VAE: a picture shows something of every latent frame before it."""

    name = "afterglow"

    def pixel_frames(self, latents):
        return latents

    def skip(self, latents, features):
        self(latents, features)

    def __call__(self, latents, features):
        shown = []
        for latent in latents[0, :3].unbind(1):
            features["glow"] = latent + 0.9 * features.get("glow", torch.zeros_like(latent))
            shown.append(features["glow"].permute(1, 2, 0))
        return (torch.stack(shown).clamp(-4, 4) * 30 + 120).round().to(torch.uint8).numpy()


def test_a_change_of_prompt_leaves_no_seam_in_what_is_shown():
    model = ts.load("toy-chunks")
    model.decoder = Afterglow()
    session = toys.open_session(model, "cache=window:budget=6f,sink=0", frames=24)
    chunks, made = [], []
    for chunk in ts.rollout(
        model, frames=24, then=[(15, "a blue room")], stream=ts.Stream(model, session)
    ):
        made.append(session.memory.latents[:, :, -model.shape().chunk :])
        chunks.append(chunk.frames)
    whole = model.decoder(torch.cat(made, 2), {})
    assert len(whole) == 24 and whole.std() > 5
    assert np.array_equal(np.concatenate(chunks), whole)


@MOSTLY_CHUNKS
def test_two_changes_and_a_rollout_that_runs_ahead(model, monkeypatch):
    """A chunk is shown before what it was made by is forgotten."""
    chunk = model.shape().chunk
    then = [(4 * chunk, "green"), (chunk + 1, "a blue room")]
    asked = _changed_asked(model) | {"plan": PLANS[model.name], "then": then}
    plain = [c.frames for c in ts.rollout(model, **asked)]
    monkeypatch.setattr(sys.modules["tachyscope.core.rollout"], "runs_beside", lambda device: True)
    order, start, decode = [], type(model).prefill_prompt, type(model).decode_latents
    monkeypatch.setattr(
        type(model), "prefill_prompt", lambda *a: order.append("prompt") or start(*a)
    )
    monkeypatch.setattr(
        type(model), "decode_latents", lambda *a: order.append("show") or decode(*a)
    )
    ahead = [c.frames for c in ts.rollout(model, **asked)]
    assert all(np.array_equal(*pair) for pair in zip(plain, ahead, strict=True))
    shown = [order[: i + 1].count("show") for i, word in enumerate(order) if word == "prompt"]
    assert shown == [0, 2, 4]


def test_a_change_happens_where_a_chunk_begins():
    model = ts.load("toy-chunks")
    session = toys.open_session(model)
    then = [(20, "c"), (1, "a"), (6, "b")]
    assert change_frames(model, session, then, 24) == [(3, "a"), (6, "b"), (21, "c")]
    list(ts.rollout(model, frames=3, stream=ts.Stream(model, session)))
    for frames, change, words in [
        (24, [(22, "x")], "begins, from frame 1 to 21 of 24, got frame 22: choose another, or"),
        (24, [(0, "x")], "got frame 0"),
        (3, [(1, "x")], "begins, of which there is one, got frame 1"),
        (24, [(4, "x"), (6, "y")], "two prompts begin with the chunk at frame 6, 'x' and 'y': "),
    ]:
        with pytest.raises(TachyscopeError, match=re.escape(words)):
            change_frames(model, session, change, frames)


def test_a_prompt_that_cannot_be_read_is_told_before_a_chunk_is_made(monkeypatch):
    model = ts.load("toy-chunks")
    monkeypatch.setattr(type(model), "sample", lambda *a: pytest.fail("a chunk was made"))
    with pytest.raises(TachyscopeError, match="a prompt has at most 63 bytes, got 99"):
        next(ts.rollout(model, frames=9, then=[(3, "x" * 99)]))


def test_a_prompt_that_leaves_no_room_is_told_before_a_chunk_is_made(monkeypatch):
    model = ts.load("toy-tokens")
    monkeypatch.setattr(type(model), "sample", lambda *a: pytest.fail("a chunk was made"))
    with pytest.raises(TachyscopeError, match="budget=3f holds 48 entries, but .* are protected"):
        next(ts.rollout(model, "cache=window:budget=3f", frames=9, then=[(3, "x" * 40)]))


def test_first_frames_have_the_videos_size():
    shipped = ts.load("atrium-world")
    model = random_wan(dataclasses.replace(shipped.config, camera=False))
    model.decoder = shipped.decoder
    frames = np.zeros((1, 64, 96, 3), np.uint8)
    words = (
        "first frames are 64x96 (height x width), this model makes 128x128: resize them, in PIL by "
        "image.resize((128, 128)), or set `size` to 64x96"
    )
    with pytest.raises(TachyscopeError, match=re.escape(words)):
        toys.open_session(model, first=frames)
    assert toys.open_session(model, first=frames, size=(64, 96)).memory.latent_frame == 1


@MOSTLY_CHUNKS
def test_prompt_and_actions_change_the_video(model):
    plain = np.concatenate([c.frames for c in ts.rollout(model, frames=6)])
    for kwargs in ({"prompt": "another"}, {"actions": "w*6"}):
        other = np.concatenate([c.frames for c in ts.rollout(model, frames=6, **kwargs)])
        assert not np.array_equal(plain, other)


def test_actions_are_letters_with_counts():
    assert parse_actions("w*3 q .", ".wq", 7) == [1, 1, 1, 2, 0, 0, 0]


@pytest.mark.parametrize(
    "text, letters, message",
    [
        (
            "z",
            ".w",
            "`actions`: this model takes letters of '.w', each with *count, got 'z': try w*20",
        ),
        (
            "w*x",
            ".w",
            "`actions`: this model takes letters of '.w', each with *count, got 'w*x': try w*20",
        ),
        ("w", "", "this model takes no actions, got 'w': leave them out"),
        (
            "w*9",
            ".w",
            "`actions` are given for 9 frames, but only 5 are made: raise `frames` or shorten the actions",
        ),
    ],
)
def test_a_fault_in_actions_is_named(text, letters, message):
    with pytest.raises(TachyscopeError, match=f"^{re.escape(message)}$"):
        parse_actions(text, letters, 5)


def test_frames_must_be_positive(model):
    with pytest.raises(TachyscopeError, match="^`frames` must be from 1 to 1,000,000, got 0$"):
        next(ts.rollout(model, frames=0))


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: ts.load("dalle"),
            "no model 'dalle'; there are: atrium-world, atrium-tokens, toy-chunks",
        ),
        (lambda: ts.load("toy-chunks", device="tpu9"), "no device 'tpu9'"),
        (lambda: ts.load("toy-chunks", dtype="int3"), "no dtype 'int3'; there are: float32"),
        (
            lambda: ts.load("wan_causal"),
            "model 'wan_causal' needs a checkpoint: give its path as `weights`",
        ),
        (lambda: ts.load("toy-tokens", "x.pt"), "model 'toy-tokens' brings its own weights"),
    ],
)
def test_a_fault_in_loading_is_named(call, message):
    with pytest.raises(TachyscopeError, match=re.escape(message)):
        call()


def test_a_text_policy_on_a_model_without_cross_attention_is_refused():
    with pytest.raises(TachyscopeError, match="has no cross-attention"):
        next(ts.rollout(ts.load("toy-tokens"), "dense text=pads", frames=1))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_toys_play_in_other_types(dtype):
    for name in MODELS:
        assert len(_video(toys.load(name, dtype=dtype), frames=4)) == 4


@MOSTLY_CHUNKS
def test_a_rollout_that_runs_ahead_yields_the_same(model, monkeypatch):
    """As on a GPU, where the next chunk is asked for before the last is decoded."""
    plan, frames = PLANS[model.name], FRAMES[model.name] + 1
    asked = {"frames": frames, "prompt": "a red room"}
    plain = list(ts.rollout(model, plan, **asked))
    monkeypatch.setattr(sys.modules["tachyscope.core.rollout"], "runs_beside", lambda device: True)
    order, sample, decode = [], type(model).sample, type(model).decode_latents
    monkeypatch.setattr(type(model), "sample", lambda *a: order.append("make") or sample(*a))
    monkeypatch.setattr(
        type(model), "decode_latents", lambda *a: order.append("show") or decode(*a)
    )
    ahead = list(ts.rollout(model, plan, **asked))
    assert order[:4] == ["make", "make", "show", "make"] and order[-2:] == ["show", "show"]
    for one, other in zip(plain, ahead, strict=True):
        assert one.index == other.index and np.array_equal(one.frames, other.frames)
        counted = {name for name in one.stats if not name.endswith("_ms")}
        assert {n: one.stats[n] for n in counted} == {n: other.stats[n] for n in counted}
    # a session that the caller holds stands where its last chunk stands
    session = toys.open_session(model, plan, **asked)
    first = next(ts.rollout(model, frames=frames, stream=ts.Stream(model, session)))
    assert session.memory.chunk == first.index + 1
    # unless they ask for more
    session = toys.open_session(model, plan, **asked)
    chunks = ts.rollout(model, frames=frames, stream=ts.Stream(model, session), overlap_decode=True)
    first = next(chunks)
    assert session.memory.chunk == first.index + 2
    last = list(chunks)[-1]
    assert session.memory.chunk == last.index + 1


def test_a_refill_that_is_refused_leaves_the_session_as_it_was():
    model = ts.load("toy-tokens")
    session = toys.open_session(model, "cache=window:budget=3f", prompt="a")
    made = [chunk.frames for chunk in ts.rollout(model, frames=1, stream=ts.Stream(model, session))]
    before = session.state()
    with pytest.raises(TachyscopeError, match="raise budget to"):
        ts.Stream(model, session).refill(
            model.encode_frames(made[0]), "a prompt that fills the cache " * 3
        )
    after = session.state()
    assert all(torch.equal(after[name], x) for name, x in before.items())
    assert len(list(ts.rollout(model, frames=1, stream=ts.Stream(model, session)))) == 1
