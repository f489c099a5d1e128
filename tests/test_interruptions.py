"""A stream that was interrupted or is shared refuses in one line; none makes another video."""

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import toys
from faults import refused
from interruptions import run_all

import tachyscope as ts
from tachyscope.core.guard import BUSY, INTERRUPTED
from tachyscope.models.vila_u.model import save_vila
from tachyscope.models.wan.loading import save_wan
from tachyscope.snapshot.folder import Snapshots

ASKED = {"prompt": "a", "seed": 3}
CASES, EACH = 10_000, 2  # processes at once
# Ctrl-C where Python collects a generator is printed, and the call goes on
unraised = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(params=["toy-chunks", "toy-tokens"])
def model(request):
    return toys.narrow_chunks() if request.param == "toy-chunks" else toys.load(request.param)


@unraised
def test_300_interrupted_and_shared_steps_make_no_other_video():
    ends = run_all(range(300))
    kinds = {kind: sum(n for end, n in ends.items() if kind in end) for kind in
             ("refused", "whole", "interrupt:", "alarm:", "fault:", "thread:", "again:")}  # fmt: skip
    assert min(kinds.values()) >= 20, kinds


@pytest.mark.slow
def test_10_000_interrupted_and_shared_steps_make_no_other_video():
    script, count = Path(__file__).with_name("interruptions.py"), CASES // EACH
    each = [
        subprocess.Popen(
            [sys.executable, script, "--first", str(300 + i * count), "--count", str(count)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for i in range(EACH)
    ]  # fmt: skip
    for process in each:
        told, _ = process.communicate()
        assert process.returncode == 0, told[-2000:]
        assert f"{count} cases" in told


def _counts(chunk):
    return {name: x for name, x in chunk.stats.items() if not name.endswith("_ms")}


def _interrupt(frames):
    raise KeyboardInterrupt


def test_an_interrupted_stream_refuses_until_it_is_restored(model):
    stream, each = ts.open(model, **ASKED), model.shape().chunk
    stream.step("w")
    state = stream.snapshot()
    with ts.open(model, **ASKED) as other:
        want = [other.step("w") for _ in range(3)][1:]
    with pytest.raises(KeyboardInterrupt):
        stream.step("w", _interrupt)
    for call in (
        stream.step,
        stream.generate,
        stream.snapshot,
        lambda: stream.set_prompt("b"),
        lambda: stream.refill(stream.session.memory.latents, "b"),
        lambda: ts.rollout(model, frames=each, stream=stream),
    ):
        assert refused(call) == INTERRUPTED
    wrong = ts.open(model, seed=9, prompt="another").snapshot()
    refused(lambda: stream.restore(wrong), "another prompt")
    assert refused(stream.step) == INTERRUPTED, "a refused snapshot restores nothing"
    stream.restore(state)
    for chunk in want:
        made = stream.step("w")
        assert np.array_equal(made.frames, chunk.frames)
        # what the interrupted chunk had counted is not the next one's
        assert _counts(made) == _counts(chunk)
    stream.close()


def test_a_restore_that_is_interrupted_is_none(model, monkeypatch):
    stream = ts.open(model, **ASKED)
    state = stream.snapshot()
    with monkeypatch.context() as patch:
        patch.setattr(stream.runner, "forget", lambda: _interrupt(None))
        with pytest.raises(KeyboardInterrupt):
            stream.restore(state)
    assert refused(stream.step) == INTERRUPTED
    stream.restore(state)
    assert stream.step("w").index == 0


def test_what_is_refused_at_the_door_interrupts_nothing(model):
    stream = ts.open(model, **ASKED)
    refused(lambda: stream.step("z"), "got 'z'")
    refused(lambda: stream.set_prompt(3), "prompt must be text")
    refused(lambda: stream.restore({}), "lacks 'meta'")
    assert stream.step("w").index == 0


@pytest.mark.parametrize("within", ["thread", "show"])
def test_a_busy_stream_refuses_every_other_call(model, within):
    stream, found, each = ts.open(model, **ASKED), [], model.shape().chunk
    state = stream.snapshot()
    calls = (
        stream.step, stream.generate, stream.snapshot, stream.close,
        lambda: stream.restore(state), lambda: stream.set_prompt("b"),
        lambda: ts.rollout(model, frames=each, stream=stream),
        lambda: Snapshots("unused").save(stream),
    )  # fmt: skip

    def beside():
        for call in calls:
            try:
                found.append(call())
            except ts.TachyscopeError as fault:
                found.append(str(fault))

    def show(frames):
        if within == "show":
            return beside()
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()

    got = [stream.step("w", show).frames, stream.step("w").frames]
    assert found == [BUSY] * len(calls)
    with ts.open(model, **ASKED) as other:
        want = [other.step("w").frames for _ in range(2)]
    assert all(map(np.array_equal, got, want))


def test_threads_that_step_one_stream_at_once_make_each_chunk_once(model):
    stream, made, faults = ts.open(model, **ASKED), {}, []
    with ts.open(model, **ASKED) as other:
        want = [other.step("w").frames for _ in range(12)]

    def work():
        for _ in range(3):
            try:
                chunk = stream.step("w")
            except ts.TachyscopeError as fault:
                faults.append(str(fault))
            else:
                assert chunk.index not in made
                made[chunk.index] = chunk.frames

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(faults) <= {BUSY} and len(made) + len(faults) == 12
    assert all(np.array_equal(frames, want[i]) for i, frames in made.items())
    assert sorted(made) == list(range(len(made)))


def test_a_rollout_that_is_interrupted_leaves_a_stream_that_refuses(model):
    each = model.shape().chunk
    stream = ts.open(model, **ASKED)
    chunks = ts.rollout(model, frames=3 * each, stream=stream, then=[(each, "a blue room")])
    next(chunks)
    stream.runner.forget = lambda: _interrupt(None)  # where the prompt changes
    with pytest.raises(KeyboardInterrupt):
        next(chunks)
    del stream.runner.forget
    assert refused(stream.step) == INTERRUPTED


# --- numbers that are none


def _toy(name, folder, damage):
    if name == "toy-chunks":
        made = toys.narrow_chunks()
        damage(made.transformer.blocks[1].ffn[2].weight)
        save_wan(made, folder)
        return "wan_causal", made
    made = toys.load(name)
    damage(made.transformer.trunk.norm.weight)
    save_vila(made, folder)
    return "vila_u", made


@pytest.mark.parametrize("name", ["toy-chunks", "toy-tokens"])
def test_a_checkpoint_with_nan_is_refused_when_it_is_read(name, tmp_path):
    def damage(weight):
        weight.data.view(-1)[3] = torch.nan

    kind, _ = _toy(name, tmp_path, damage)
    refused(lambda: ts.load(kind, tmp_path), "must hold finite numbers, it has NaN or infinity in")


@pytest.mark.parametrize("part", ["trunk", "head"])
def test_a_first_chunk_of_nan_is_one_line_and_no_black_video(model, part):
    """Such as weights that overflow in a narrow dtype, or become NaN before a stream is opened."""
    if model.name == "toy-chunks":
        layer = (
            model.transformer.blocks[0].ffn[0] if part == "trunk" else model.transformer.head.head
        )
        layer.weight.data.fill_(torch.nan)
    elif part == "trunk":
        model.transformer.trunk.norm.weight.data.fill_(torch.nan)
    else:
        for weight in model.transformer.head.classifier_mlp.parameters():
            weight.data.fill_(torch.nan)
    stream = ts.open(model, **ASKED)
    words = refused(stream.step, "makes NaN or infinity in torch.float32: get its checkpoint again")
    assert words.startswith(model.name)
    assert refused(stream.step) == INTERRUPTED
    refused(lambda: list(ts.rollout(model, frames=3)), "makes NaN or infinity")


def test_only_the_first_chunk_is_looked_at(model, monkeypatch):
    """To look at numbers makes the host wait for the device."""
    looked, own = [], type(model).finite

    def finite(self, session, latents):
        looked.append(session.memory.chunk)
        return own(self, session, latents)

    monkeypatch.setattr(type(model), "finite", finite)
    stream = ts.open(model, **ASKED)
    for _ in range(3):
        stream.step()
    assert looked == [1]
