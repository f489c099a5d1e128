"""A stream's steps are a rollout's chunks, and a key a step gets the CUDA graph."""

import dataclasses
import weakref

import numpy as np
import pytest
import torch
import toys
from faults import refused
from test_graph_runner import CONFIG, Again

import tachyscope as ts
from tachyscope.core import kv_allocation, session_state
from tachyscope.models.wan.random import random_wan

ASKED = {"prompt": "a red room", "seed": 2}
PLANS = {
    "toy-chunks": "cache=merge:budget=9f attention=ann:read=0.5",
    "toy-tokens": "cache=window:budget=5f",
}


@pytest.fixture(params=["toy-chunks", "toy-tokens"])
def model(request):
    return toys.load(request.param)


def _video(chunks):
    return np.concatenate([chunk.frames for chunk in chunks])


def _counts(chunk):
    return {name: x for name, x in chunk.stats.items() if not name.endswith("_ms")}


def test_steps_are_the_chunks_of_a_rollout(model):
    each, count = model.shape().chunk, 4
    want = list(
        ts.rollout(
            model, PLANS[model.name], frames=each * count, actions=f"w*{each} q*{each}", **ASKED
        )
    )
    with ts.open(model, PLANS[model.name], frames=each * count, **ASKED) as stream:
        shown, begun = [], stream.session.memory.chunk

        def show(frames):
            shown.append((frames, stream.session.memory.chunk - begun))

        keys = f"w*{each}", [5] * each, ""
        got = [stream.step(key, show) for key in keys] + [stream.step()]
    # shown before the chunk is in the cache
    assert [at for _, at in shown] == [0, 1, 2]
    assert all(frames is chunk.frames for (frames, _), chunk in zip(shown, got, strict=False))
    for one, other in zip(got, want, strict=True):
        assert one.index == other.index and np.array_equal(one.frames, other.frames)
        assert _counts(one) == _counts(other)
        assert one.stats["chunk_ms"] > 0 and one.stats["decode_ms"] > 0


def test_one_action_is_held_for_the_chunk_and_several_are_one_a_frame():
    model = ts.load("toy-chunks")
    held, spelled, other = (ts.open(model, **ASKED).step(x) for x in ("w", "w*3", "w ."))
    assert np.array_equal(held.frames, spelled.frames)
    assert not np.array_equal(held.frames, other.frames)
    stream = ts.open(model, **ASKED)
    refused(lambda: stream.step("w*4"), "`actions` are given for 4 frames, but only 3 are made")
    refused(lambda: stream.step("z"), "got 'z'")
    assert stream.step("w").index == 0, "what is refused makes nothing"


@pytest.mark.parametrize("shows", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_key_a_step_is_answered_by_the_graph_from_the_fourth_full_chunk_on(shows):
    model = random_wan(dataclasses.replace(CONFIG, actions=".wsa"))
    plan, keys, found = "cache=window:budget=9f", "wsa.wwsa", []

    def record(*given):
        found.append(Again(*given))
        return found[-1]

    stream, shown = ts.open(model, plan, prompt="a b"), []

    def show(frames):
        shown.append((frames, stream.session.memory.total_entries))

    stream.runner.record = record
    got = [stream.step(key, show if shows else None) for key in keys]
    entries = 3 * stream.session.shape.tokens_per_frame
    # before the chunk is in the cache; a repetition has the host's numbers of the one recorded
    assert [at for _, at in shown[:5]] == [entries * i for i in range(5 * shows)]
    assert len(shown) == len(keys) * shows
    assert all(frames is chunk.frames for (frames, _), chunk in zip(shown, got, strict=False))
    assert all(0 < chunk.stats["decode_ms"] < 1e4 for chunk in got)
    # two chunks fill the cache, two more are compared, the third full one is recorded
    assert [chunk.stats["cuda_graph"] for chunk in got] == [0, 0, 0, 0, 0, 1, 1, 1]
    assert [x.repeats for x in found] == [3]
    actions = " ".join(f"{key}*3" for key in keys)
    want = ts.rollout(model, plan, prompt="a b", frames=24, actions=actions)
    assert np.array_equal(_video(got), _video(want))


def test_a_prompt_that_is_set_is_read_at_the_next_chunk(model):
    each = model.shape().chunk
    want = ts.rollout(model, frames=4 * each, then=[(2 * each, "a blue room")], **ASKED)
    stream = ts.open(model, frames=4 * each, **ASKED)
    got = [stream.step(), stream.step()]
    before = stream.session.memory.source
    stream.set_prompt("a green room")
    stream.set_prompt("a blue room")
    assert stream.session.memory.source == before, "until the next chunk nothing changes"
    got += [stream.step(), stream.step()]
    assert np.array_equal(_video(got), _video(want))
    refused(lambda: stream.set_prompt(3), "prompt must be text")


def test_a_prompt_that_is_set_before_the_first_chunk_is_the_videos(model):
    stream = ts.open(model, prompt="a green room", seed=2)
    stream.set_prompt("a red room")
    want = ts.open(model, **ASKED)
    assert np.array_equal(stream.step().frames, want.step().frames)


def test_a_snapshot_goes_on_in_another_stream(model):
    plan = PLANS[model.name]
    stream = ts.open(model, plan, **ASKED)
    stream.step()
    state = {name: x.clone() for name, x in stream.snapshot().items()}
    want = [stream.step(), stream.step()]
    other = ts.open(model, plan, prompt="a red room", seed=9)
    other.step("w")
    other.restore(state)
    got = [other.step(), other.step()]
    assert [c.index for c in got] == [c.index for c in want] == [1, 2]
    assert np.array_equal(_video(got), _video(want))
    # a prompt that waits for the next chunk is in the snapshot
    stream.set_prompt("a blue room")
    state = stream.snapshot()
    refused(lambda: other.restore(state), "prompt")
    blue = ts.open(model, plan, prompt="a blue room")
    blue.restore(state)
    assert np.array_equal(blue.step().frames, stream.step().frames)


def test_a_step_does_not_come_between_a_rollouts_chunks():
    model = ts.load("toy-chunks")
    stream = ts.open(model)
    chunks = ts.rollout(model, frames=6, stream=stream)
    refused(stream.step, "this stream is being played by another rollout")
    assert [next(chunks).index, next(chunks).index] == [0, 1]
    chunks.close()
    assert stream.step().index == 2


def test_what_generate_did_not_return_is_not_decoded():
    stream = ts.open(ts.load("toy-chunks"))
    refused(lambda: stream.decode(stream.step()), "what `generate` returned, got a Chunk")
    assert stream.decode(stream.generate()).index == 1, "the stream goes on"


def test_a_closed_stream_holds_nothing_and_says_so(model):
    with ts.open(model, **ASKED) as stream:
        stream.step()
        stream.set_prompt("a blue room")
    assert (
        stream.session.memory.chunk == 1
        and not stream.session.memory.layers
        and not stream.session.memory.texts
    )
    for call in (stream.step, stream.snapshot, lambda: stream.set_prompt("a"),
                 lambda: stream.restore({})):  # fmt: skip
        refused(call, "this stream is closed: open another")


def held(stream):
    """Weak references to the tensors of a stream's cache."""
    layers = stream.session.memory.layers
    kinds = (lambda x: x.tensors(), lambda x: x.buffers(), lambda x: x.host_tensors())
    return [weakref.ref(x) for part in layers for kind in kinds for x in kind(part).values()]


REPLAYED = "replay=attentive:share=0.5,age=2"


@pytest.mark.parametrize(
    "name, plan",
    [("toy-chunks", "fast"), ("toy-chunks", REPLAYED), ("toy-tokens", "fast"),
     ("toy-tokens", REPLAYED)],
)  # fmt: skip
def test_the_memory_of_a_closed_stream_is_free(name, plan):
    with ts.open(toys.load(name), plan, **ASKED) as stream:
        list(stream.take(3))
        tensors = [*held(stream), weakref.ref(stream.session.memory.latents)]
    assert len(tensors) > 1 and not any(x() is not None for x in tensors)
    assert stream.session.memory.total_entries > 0, "its counts stay"


def test_a_new_prompt_frees_the_old_cache_before_it_allocates(monkeypatch):
    stream = ts.open(toys.load("toy-chunks"), REPLAYED, **ASKED)
    list(stream.take(3))
    tensors, alive = held(stream), []

    def empty_layer(*given):
        alive.append(sum(x() is not None for x in tensors))
        return kv_allocation.empty_layer(*given)

    monkeypatch.setattr(session_state, "empty_layer", empty_layer)
    stream.set_prompt("a blue room")
    stream.step()
    assert alive == [0] * stream.session.shape.layers


def test_a_restored_stream_frees_the_cache_that_it_had():
    stream = ts.open(toys.load("toy-chunks"), "cache=window:budget=9f", **ASKED)
    stream.runner.record = Again
    before = stream.snapshot()
    assert [chunk.stats["cuda_graph"] for chunk in stream.take(8)][-1]
    tensors = held(stream)
    stream.restore(before)
    assert not any(x() is not None for x in tensors)


def test_a_step_leaves_the_callers_modes_alone(model):
    stream = ts.open(model, **ASKED)
    with torch.enable_grad():
        stream.step()
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


# --- batches

BATCH = {"prompt": ["a red room", "a blue room with a long name", ""], "seed": [2, 7, 3]}
FILM = np.random.default_rng(0).integers(0, 256, (3, 2, 32, 32, 3), np.uint8)


def _alone(i, **asked):
    return {**asked, "prompt": BATCH["prompt"][i], "seed": BATCH["seed"][i]}


@pytest.mark.parametrize("bounded", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_video_of_a_batch_is_the_video_made_alone(model, bounded):
    batch, each = BATCH, model.shape().chunk
    if bounded and model.shape().token_by_token:
        # the longest prompt, which a bounded cache of these models holds, leaves all the same room
        batch = BATCH | {"prompt": ["a red room", "a big room", "ten bytes."]}
    asked = {"plan": PLANS[model.name] if bounded else "dense", "actions": f"w*{2 * each} q"}
    chunks = list(ts.rollout(model, frames=5 * each, **batch, **asked))
    assert chunks[0].frames.shape[:2] == (3, each)
    assert chunks[0].stats["frames"] == 3 * each
    videos = np.concatenate([chunk.frames for chunk in chunks], 1)
    work = 0.0
    for i, video in enumerate(videos):
        alone = {"prompt": batch["prompt"][i], "seed": batch["seed"][i]}
        want = list(ts.rollout(model, frames=5 * each, **alone, **asked))
        # a sum over more rows may be rounded otherwise: a level of 255
        assert np.abs(video.astype(int) - _video(want)).max() <= 1, i
        work += sum(chunk.stats["macs"] for chunk in want)
    assert not np.array_equal(videos[0], videos[1])
    # but for the padding of shorter prompts
    assert sum(chunk.stats["macs"] for chunk in chunks) == pytest.approx(work, rel=0.05)


@pytest.mark.parametrize("passes", ["all", "draft:places=3"])
def test_a_token_window_of_a_batch_reaches_as_far_in_every_row(passes):
    """The longest prompt leaves entries out before the others have any to leave out."""
    model = toys.load("toy-tokens", dtype="float64")
    model.sampler = dataclasses.replace(model.sampler, cfg=1.0)
    model.config = dataclasses.replace(model.config, sampler=model.sampler)
    prompts = ["a", "a long prompt of some forty-two letters ok"]
    plan = f"attention=window:tokens=12,sink=2 passes={passes}"

    def codes(prompt, seed):
        stream = ts.open(model, plan, prompt=prompt, seed=seed)
        return torch.cat([stream.generate([0]).latents for _ in range(3)], 1)

    together = codes(prompts, [1, 2])
    for i, prompt in enumerate(prompts):
        assert torch.equal(together[i : i + 1], codes(prompt, i + 1)), prompt


@pytest.mark.slow
def test_a_batch_goes_on_from_each_videos_own_frames():
    model = toys.load("toy-tokens")
    asked = {"frames": 2, "first_actions": "w q"}
    (*chunks,) = ts.rollout(model, **BATCH, **asked, first=list(FILM))
    for i, video in enumerate(np.concatenate([chunk.frames for chunk in chunks], 1)):
        want = _video(ts.rollout(model, **_alone(i, **asked), first=FILM[i]))
        assert np.abs(video.astype(int) - want).max() <= 1


def test_one_prompt_is_for_every_seed_and_a_list_of_one_is_a_batch():
    model = ts.load("toy-chunks")
    both = ts.open(model, prompt="a red room", seed=[2, 3]).step("w").frames
    (one,) = ts.open(model, prompt=["a red room"], seed=3).step("w").frames
    assert both.shape == (2, *one.shape) and np.abs(both[1].astype(int) - one).max() <= 1
    assert np.array_equal(one, ts.open(model, prompt="a red room", seed=3).step("w").frames)


def test_a_batch_changes_its_prompts_and_goes_on_from_a_snapshot(model):
    each = model.shape().chunk
    stream = ts.open(model, **BATCH)
    stream.step()
    stream.set_prompt(["green", "a blue room with a long name", "black"])
    state = {name: x.clone() for name, x in stream.snapshot().items()}
    got = stream.step().frames
    for i, prompt in ((0, "green"), (2, "black")):
        chunks = list(ts.rollout(model, **_alone(i), frames=2 * each, then=[(each, prompt)]))
        assert np.abs(got[i].astype(int) - chunks[1].frames).max() <= 1
    other = ts.open(model, prompt=["green", BATCH["prompt"][1], "black"], seed=0)
    other.restore(state)
    assert np.array_equal(other.step().frames, got)
    refused(lambda: stream.set_prompt(["green", "blue"]), "2 of `prompt` and 3 of `seed`")
    fewer = ts.open(model, prompt=["green", "black"])
    refused(lambda: fewer.restore(state), "this state was taken with batch=")


def test_a_faulty_batch_is_one_line(model):
    for asked, words in [
        ({"prompt": ["a", "b"], "seed": [1]}, "got 2 of `prompt` and 1 of `seed`: give as many"),
        ({"prompt": []}, "got 0 of `prompt`"),
        ({"prompt": ["a", 3]}, "prompt must be text, got 3"),
        ({"seed": [1, "x"]}, "`seed` must be a whole number"),
        ({"seed": [1, 2], "first": [FILM[0]]}, "here 2, got 1: give as many"),
        ({"seed": [1, 2], "first": "a.png"}, "here 2, got 1: give as many"),
        ({"seed": [1, 2], "first": [FILM[0], FILM[1][:1]]}, "have one size and number, got [2, 3"),
        ({"seed": [1, 2], "noise": torch.zeros(1)}, "`noise` is for one video"),
    ]:
        refused(lambda asked=asked: ts.open(model, **asked), words)
    stream = ts.open(model, prompt=["a", "b"], seed=[1, 2])
    refused(lambda: ts.rollout(model, frames=3, stream=stream, seed=[1, 3]), "another seed")
    refused(lambda: ts.open(model).set_prompt(["a"]), "prompt must be text")


@pytest.mark.slow
def test_a_prompt_that_changes_after_a_snapshot_makes_what_an_unbroken_stream_makes(model):
    """The newest latents, their actions and the number of the chunk go with the snapshot."""
    plan = PLANS[model.name]
    stream = ts.open(model, plan, **ASKED)
    for key in ("w", "q", "", "d", "w"):  # more than the cache has room for
        stream.step(key)
    stream.set_prompt("a blue room")
    stream.step("a")
    state = stream.snapshot()
    stream.set_prompt("a green room")
    want = [stream.step("w"), stream.step("s")]
    other = ts.open(model, plan, prompt="a blue room", seed=2)
    other.restore(state)
    other.set_prompt("a green room")
    got = [other.step("w"), other.step("s")]
    assert np.array_equal(_video(got), _video(want))
    assert [c.index for c in got] == [c.index for c in want] == [6, 7]
    again = ts.open(model, plan, prompt="a blue room", seed=2)
    before = again.snapshot()
    for name, value, words in (
        ("sizes", 9, "lengths of the chunks"),
        ("actions", 99, "numbers in actions from 99"),
        ("chunk", -1, "numbers in chunk from -1"),
    ):
        broken = state | {f"kept.{name}": torch.full_like(state[f"kept.{name}"], value)}
        refused(lambda broken=broken: again.restore(broken), words)
    after = again.snapshot()
    assert all(torch.equal(x, after[key]) for key, x in before.items())
