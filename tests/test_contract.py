"""What every registered policy owes, with every family of models.

A policy that is registered and not listed here fails the first test. Its line gives two settings:
wide open, which must equal dense, and a bound small enough to act on a short video.
"""

import dataclasses
import functools
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
from test_graph_runner import CONFIG, Again
from toys import load, toy_cosmos

import tachyscope as ts
from tachyscope.core.chunk_runner import ChunkRunner
from tachyscope.core.policy import QUESTIONS, policies
from tachyscope.measure.calibrate import calibrate
from tachyscope.models.atrium.world import ACTIONS
from tachyscope.models.checkpoint import write_tensors
from tachyscope.models.wan.context import Absolute, Rolling
from tachyscope.models.wan.random import random_wan

# kind: policy: (wide open, acting)
CONTRACT = {
    "cache": {
        "keep_all": ("keep_all", "keep_all"),
        "window": ("window:budget=99f", "window:budget=9f"),
        "merge": ("merge:budget=99f", "merge:budget=9f"),
        "dedup": ("dedup:budget=99f", "dedup:budget=9f"),
        "strided": (
            "strided:budget=99f,far=99,every=1,period=2",
            "strided:budget=9f,far=16,every=2,period=2",
        ),
        # read by an index alone
        "bank": (
            "bank:resident=99f attention=ann:read=1",
            "bank:resident=9f,budget=15f attention=ann:read=0.6,block=2",
        ),
    },
    # codes have no open setting: how near they come to native is held by tests/test_store.py
    "store": {
        "native": ("native", "native"),
        **{name: ("native", name) for name in ("int8", "fp8", "int4", "int2")},
    },
    "attention": {
        "dense": ("dense", "dense"),
        "window": ("window:tokens=100000", "window:tokens=20"),
        "ann": ("ann:read=1", "ann:read=0.5,block=2"),
        "pose": (
            "pose:past_weight=1 cache=bank:resident=99f",
            "pose cache=bank:resident=9f,budget=15f",
        ),
        "similar": (
            "similar:past_weight=1 cache=bank:resident=99f",
            "similar:newest=1 cache=bank:resident=9f,budget=15f",
        ),
    },
    "text": {
        "dense": ("dense", "dense"),
        "pads": ("pads", "pads"),
        "ann": ("ann:hash=lsh,bits=1", "ann:keep=2"),
    },
    "passes": {
        "all": ("all", "all"),
        "every_k": ("every_k:k=1", "every_k:k=2"),
        "teacache": ("teacache:threshold=0", "teacache:threshold=100"),
        "flowcache": ("flowcache:threshold=0", "flowcache:threshold=0.2"),
        "draft": ("draft:places=0", "draft:places=4"),
    },
    "replay": {
        "attentive": ("attentive:share=0", "attentive:share=0.5"),
        "random": ("random:share=0", "random:share=0.5"),
        "every_k": ("every_k:k=1", "every_k:k=2"),
        "input": ("input:share=0", "input:share=0.5"),
        "neurons": ("neurons:share=0", "neurons:share=0.5,age=2,file=CALIBRATION"),
        "prune": ("prune:share=0", "prune:share=0.5,file=CALIBRATION"),
    },
}
# a past that is weighed, by every policy that can: of weight 1, and of another
WEIGHED = {
    ("attention", "dense of weight"): ("dense:past_weight=1", "dense:past_weight=4,newest=1"),
    ("attention", "window of weight"): (
        "window:tokens=100000,past_weight=1",
        "window:tokens=20,past_weight=4,newest=0",
    ),
    ("attention", "ann of weight"): (
        "ann:read=1,past_weight=1",
        "ann:read=0.5,block=2,past_weight=4,order=time",
    ),
    ("cache", "bank of weight"): (
        "bank:resident=99f attention=ann:read=1,past_weight=1",
        "bank:resident=9f,budget=15f attention=ann:read=0.6,block=2,past_weight=4,order=time",
    ),
}
# what a bank has resident as codes: as for stores, these have no open setting
CODED = {
    ("cache", "bank of codes"): (
        "bank:resident=99f attention=ann:read=1",
        "bank:resident=9f,budget=15f attention=ann:read=0.6,block=2 store=fp8",
    ),
}
OURS = re.compile(r"tachyscope\.").match  # other distributions hold their own to it
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def families(kind, name):
    """Models that a policy serves; passes are skipped in "steps", which has four of denoising."""
    name = name.split()[0]
    if name == "int2":
        return ("chunks", "rolling")  # keys by groups of a latent frame's entries
    if name == "pose":
        return ("poses",)  # "chunks" of a model that knows where its camera stands
    if name == "similar":
        return ("chunks",)
    if kind == "passes":
        return ("tokens", "cosmos") if name == "draft" else ("steps",)
    if name in ("neurons", "prune"):
        return ("tokens",)  # what calibrates cosmos are given frames
    # a token model has no cross-attention and no bank
    if kind == "text" or name == "bank":
        return ("chunks", "rolling")
    return ("chunks", "rolling", "tokens", "cosmos")


QUICK = ("chunks", "tokens", "poses", "steps")  # the other families run with the slow tests
LISTED = {(kind, name): x for kind, found in CONTRACT.items() for name, x in found.items()}
CASES = [
    pytest.param(kind, name, family, marks=() if family in QUICK else pytest.mark.slow)
    for kind, name in LISTED | WEIGHED | CODED
    for family in families(kind, name)
]
every = pytest.mark.parametrize("kind, name, family", CASES, ids=str)
on_every_device = pytest.mark.parametrize("device", DEVICES)
CHUNKS = 5


@functools.cache
def model_of(family, device):
    if family == "tokens":
        return load("toy-tokens", device=device)
    if family == "cosmos":
        return toy_cosmos(device=device)
    if family == "poses":
        return random_wan(dataclasses.replace(CONFIG, actions=ACTIONS), device=device)
    rule = Rolling() if family == "rolling" else Absolute()
    steps = (1000, 750, 500, 250) if family == "steps" else CONFIG.steps
    return random_wan(dataclasses.replace(CONFIG, context=rule, steps=steps), device=device)


@functools.cache
def calibration():
    """The file of the toy token model's."""
    path = Path(tempfile.mkdtemp()) / "toy.safetensors"
    found = calibrate(model_of("tokens", "cpu"), clips=1, shares=[0.5])
    write_tensors(path, found.tensors())
    return path


def setting_of(kind, name):
    return (LISTED | WEIGHED | CODED)[kind, name]


def plan_of(kind, setting, family):
    # a rolling window's budget counts the five chunks under way
    if family == "rolling":
        setting = setting.replace("budget=9f", "budget=15f").replace("resident=9f", "resident=15f")
    if "CALIBRATION" in setting:
        setting = setting.replace("CALIBRATION", str(calibration()))
    return f"dense {kind}={setting}"


def stream(plan, family, device, seed=0):
    model = model_of(family, device)
    if family == "cosmos":
        first = np.arange(3 * 16 * 16 * 3, dtype=np.uint8).reshape(3, 16, 16, 3)
        return ts.open(model, plan, first=first, seed=seed)
    return ts.open(model, plan, prompt="a b", seed=seed)


def play(stream, chunks=CHUNKS):
    """The frames of so many chunks, and what each counted."""
    # a walk in which the camera turns, and comes back
    steps = "qqwqqwqqw"[:chunks] if stream.model.actions else [None] * chunks
    made = [stream.step(step) for step in steps]
    return np.concatenate([chunk.frames for chunk in made]), [chunk.stats for chunk in made]


@functools.cache
def dense(family, device):
    return play(stream("dense", family, device))


def test_every_registered_policy_is_held_to_the_contract():
    assert {kind: sorted(found) for kind, found in CONTRACT.items()} == {
        kind: [name for name, policy in policies(kind).items() if OURS(policy.__module__)]
        for kind in QUESTIONS
    }


@on_every_device
@every
def test_off_equals_dense(kind, name, family, device):
    plan = plan_of(kind, setting_of(kind, name)[0], family)
    (frames, rows), (want, counted) = play(stream(plan, family, device)), dense(family, device)
    assert np.array_equal(frames, want)
    # what is left out may be counted as less, where it changed nothing: padding of the prompt
    for row, other in zip(rows, counted, strict=True):
        assert row["pairs"] == other["pairs"] == row["pairs_dense"]
        assert row["rows_computed"] == other["rows_computed"]


@on_every_device
@every
def test_a_bound_is_kept_and_its_state_is_whole(kind, name, family, device):
    plan = plan_of(kind, setting_of(kind, name)[1], family)
    one = stream(plan, family, device)
    _, before = play(one, 3)
    state = one.snapshot()
    frames, rows = play(one)
    session = one.session
    if not session.plan.cache.grows:
        slots = session.memory.slots_for(session.memory.lengths)
        assert all(layer.slots == slots for layer in session.memory.layers)
        assert session.memory.past <= slots - session.shape.max_pass_tokens
        sizes = {row["cache_allocated_mb"] for row in [*before, *rows]}
        assert len(sizes) == 1
    skipped = sum(row.get("passes_skipped", 0.0) for row in rows)
    assert (skipped > 0) == (kind == "passes" and name not in ("all", "draft"))
    # a stream that takes the state over goes on with the same frames and the same work
    other = stream(plan, family, device)
    other.restore(state)
    again, counted = play(other)
    assert np.array_equal(frames, again)
    totals = {}  # MLP rows of a chunk, by passes that it skipped
    for row, twin in zip(rows, counted, strict=True):
        for key in ("pairs", "macs", "rows_computed", "rows_replayed"):
            assert row[key] == twin[key], key
        if name == "draft":  # refuted drafts are work too
            continue
        # work that is not done is counted as such, none of it twice
        assert 0 < row["pairs"] <= row["pairs_dense"]
        seen = row["rows_computed"] + row["rows_replayed"]
        assert totals.setdefault(row.get("passes_skipped", 0.0), seen) == seen


# only full chunks of a bounded cache ask for the same launches each time
CAPTURED = [
    (kind, name, family)
    for kind, name, family in (case.values for case in CASES)
    if family in ("chunks", "steps", "poses") and name != "keep_all"
]
# chunks that differ from each other: by turns, by draws of the host, by what the host reads
DIFFER = {
    ("cache", "strided"), ("replay", "every_k"), ("replay", "random"), ("passes", "flowcache"),
}  # fmt: skip


def bounded(kind, name):
    setting = f"{kind}={setting_of(kind, name)[1]}"
    return f"dense {setting}" if "cache=" in setting else f"dense cache=window:budget=9f {setting}"


@pytest.mark.parametrize("kind, name, family", CAPTURED)
def test_a_replayed_chunk_equals_one_made_anew(kind, name, family):
    """With a stand-in for the device: what is recorded once is right for every later chunk."""
    films, replayed = [], []
    for record in (None, Again):
        one = stream(bounded(kind, name), family, "cpu")
        one.runner = ChunkRunner(one.model, one.session, record)
        frames, rows = play(one, 9)
        films.append(frames)
        replayed.append([row["cuda_graph"] for row in rows])
    assert np.array_equal(*films)
    assert not any(replayed[0])
    assert replayed[1][-1] == ((kind, name) not in DIFFER)


@pytest.mark.gpu
@pytest.mark.parametrize("kind, name, family", CAPTURED)
def test_a_cuda_graph_equals_single_launches(kind, name, family):
    one, other = (stream(bounded(kind, name), family, "cuda") for _ in range(2))
    other.runner = ChunkRunner(other.model, other.session, None)
    (frames, rows), (want, _) = play(one, 9), play(other, 9)
    assert np.array_equal(frames, want)
    assert rows[-1]["cuda_graph"] == ((kind, name) not in DIFFER)
