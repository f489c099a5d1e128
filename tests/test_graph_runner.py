"""Chunks by repeated launches are the chunks that would have been made anew."""

import dataclasses
import random
from pathlib import Path

import pytest
import torch
import toys

import tachyscope as ts
from tachyscope.core.chunk_runner import ChunkRunner
from tachyscope.core.observers import Timing
from tachyscope.measure.inspection.stats import StatsObserver
from tachyscope.models.atrium.world import ACTIONS
from tachyscope.models.wan.config import WanConfig
from tachyscope.models.wan.context import Restart
from tachyscope.models.wan.random import random_wan
from tachyscope_lab.bench.recorded_kv import Recorder
from tachyscope_lab.evaluation.recall import RecallObserver

CONFIG = WanConfig(
    dim=32, ffn_dim=48, layers=2, heads=2, text_dim=8, text_len=6, size=(4, 8), stride=(1, 8, 8),
    steps=(1000, 500), stock="dense",
)  # fmt: skip
HOST = ("chunk", "_latent_frame", "past", "now", "total_entries", "made")


class Again:
    """Repeats a chunk with the host's numbers as they were: what a device would do by itself."""

    def __init__(self, session, make, ready=None):
        self.session, self.make, self.repeats = session, make, 0
        self.host = {name: getattr(session.memory, name) for name in HOST}
        self.latents = make(ready)

    def repeat(self, ready):
        session = self.session
        now, counted = {name: getattr(session.memory, name) for name in HOST}, session.work.take()
        for name, value in self.host.items():
            setattr(session.memory, name, value)
        self.latents = self.make(ready)
        for name, value in now.items():
            setattr(session.memory, name, value)
        session.work.take()
        session.work.add(counted)
        self.repeats += 1


def _open(plan, seed=0, **changes):
    model = random_wan(dataclasses.replace(CONFIG, **changes))
    return model, toys.open_session(model, plan, prompt="a b", seed=seed)


def _play(model, session, make, count):
    rows, policy_rng = [], random.Random(0)
    with torch.inference_mode():
        for _ in range(count):
            chunk = session.shape.chunk if model.actions else 0
            latents = make([policy_rng.randrange(len(model.actions)) for _ in range(chunk)])
            rows.append((latents, session.meter.take()))
    return rows


PLANS = [
    "cache=window:budget=9f",
    "cache=window:budget=9f,sink=2,positions=reindexed",
    "cache=merge:budget=9f",
    "cache=dedup:budget=9f text=pads",
    "cache=merge:budget=9f,match=unrotated",
    "cache=merge:budget=9f attention=ann:read=0.5,block=2,tile=4 text=pads",
    "cache=merge:budget=9f attention=ann:read=0.5,hash=lsh,block=2",
    "cache=merge:budget=9f replay=attentive:share=0.5,drift=true",
    "cache=window:budget=9f attention=window:tokens=20",
]


@pytest.mark.parametrize(
    "plan, actions",
    [
        pytest.param(plan, actions, marks=() if i % 2 == bool(actions) else pytest.mark.slow)
        for i, plan in enumerate(PLANS)
        for actions in ("", ".wsa")
    ],
)
def test_repeated_chunks_are_those_made_anew(plan, actions):
    _check_repeated(plan, actions=actions)


def test_repeated_chunks_go_on_walking():
    """Where a camera stands is the device's own number, as the time is."""
    _check_repeated(PLANS[0], actions=ACTIONS, camera=True, size=(4, 4))


def test_repeated_chunks_of_an_own_model_follow_its_actions():
    """It has defined nothing that says how recorded launches are given actions."""
    example = Path(__file__).parent.parent / "examples" / "my_world.py"
    model = ts.load(f"{example}:MyWorld")
    want, got = [], []
    for record, frames in ((None, want), (Again, got)):
        session = toys.open_session(model, "cache=window:budget=9f", seed=0)
        make = ChunkRunner(model, session, record)
        with torch.inference_mode():
            frames += [make([i % 3]) for i in range(20)]
        assert make.replayed == (record is not None)
    assert all(map(torch.equal, got, want))


def _check_repeated(plan, **changes):
    found = []

    def record(*given):
        found.append(Again(*given))
        return found[-1]

    model, session = _open(plan, **changes)
    got = _play(model, session, ChunkRunner(model, session, record), 10)
    plain, other = _open(plan, **changes)
    want = _play(plain, other, ChunkRunner(plain, other), 10)
    assert [x.repeats for x in found] == [5]  # two to fill, two alike, one recorded
    for (x, ours), (y, theirs) in zip(got, want, strict=True):
        assert torch.equal(x, y)
        assert ours == theirs
    ours, theirs = session.state(), other.state()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    "plan",
    [
        "dense",
        "cache=merge:threshold=0.9",
        "cache=window:budget=9f replay=attentive:share=0.5,age=2",
        "cache=window:budget=9f replay=every_k:k=2",
        "cache=window:budget=9f replay=random:share=0.5",
    ],
)
def test_what_differs_from_chunk_to_chunk_is_never_recorded(plan):
    def record(*given):
        raise AssertionError("recorded")

    model, session = _open(plan)
    _play(model, session, ChunkRunner(model, session, record), 8)


def test_a_model_that_drops_its_past_at_times_is_never_recorded():
    def record(*given):
        raise AssertionError("recorded")

    model, session = _open("cache=window:budget=9f", context=Restart(21))
    _play(model, session, ChunkRunner(model, session, record), 8)
    assert (
        session.memory.past == 2 * 3 * session.shape.tokens_per_frame
    )  # dropped at frame 21, and two chunks since


@pytest.mark.parametrize("observer", [StatsObserver, Timing, RecallObserver, Recorder])
def test_what_the_host_looks_at_is_never_recorded(observer):
    def record(*given):
        raise AssertionError("recorded")

    model = random_wan(CONFIG)
    session = toys.open_session(model, "cache=window:budget=9f", observers=[observer()])
    _play(model, session, ChunkRunner(model, session, record), 8)
    assert session.memory.past == 6 * session.shape.tokens_per_frame


def test_a_new_prompt_and_a_taken_up_state_are_recorded_anew():
    found = []

    def record(*given):
        found.append(Again(*given))
        return found[-1]

    model, session = _open("cache=window:budget=9f")
    make = ChunkRunner(model, session, record)
    _play(model, session, make, 7)
    state = session.state()
    _play(model, session, make, 1)
    assert [x.repeats for x in found] == [3]
    with torch.inference_mode():
        model.prefill_prompt(session, model.encode_prompt("c"))
    _play(model, session, make, 4)
    assert [x.repeats for x in found] == [3, 1]
    session.restore(state)
    with torch.inference_mode():
        model.prefill_prompt(session, model.encode_prompt("a b"))
    _play(model, session, make, 4)
    assert [x.repeats for x in found] == [3, 1, 1]
