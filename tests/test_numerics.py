"""A video does not depend on torch's settings, which are the caller's, and leaves them alone."""

import contextlib
import functools
import threading
import traceback

import numpy as np
import pytest
import torch
import toys
from torch.overrides import TorchFunctionMode

import tachyscope as ts
from tachyscope.core.plan import NAMES
from tachyscope.io.torch_defaults import own_numerics

MERGED = "cache=merge:budget=8f attention=ann:read=0.5,hash=lsh replay=attentive:share=0.5"
WINDOW = "cache=window:budget=9f attention=window:tokens=64 replay=random:share=0.5"
TOYS = [
    (name, plan, frames)
    for name, frames in (("toy-chunks", 12), ("toy-tokens", 2))
    for plan in (*NAMES, MERGED, WINDOW)
]
OFTEN = [case for case in TOYS if case[1] in ("dense", MERGED)]
RARE = [case for case in TOYS if case[0] == "toy-tokens" and case not in OFTEN]
SEVERAL = [case for case in TOYS if case[1] in ("dense", "fast", MERGED, WINDOW)]
# the shipped models are of the same parts, so that a plan or two of theirs show the rest
SHIPPED = [("atrium-world", "fast", 2), ("atrium-tokens", "fast", 1)]


@contextlib.contextmanager
def _settings(dtype, autocast, seed):
    before = torch.get_default_dtype(), torch.get_rng_state()
    try:
        torch.set_default_dtype(dtype)
        torch.manual_seed(seed)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            yield
    finally:
        torch.set_default_dtype(before[0])
        torch.set_rng_state(before[1])


def _seen():
    """What a caller can see of the settings."""
    return (
        torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(), torch.get_rng_state().tolist(),
    )  # fmt: skip


def _first(name):
    rows = np.arange(128 * 128 * 3, dtype=np.uint8).reshape(1, 128, 128, 3)
    return rows if name.startswith("atrium") else None


def _play(name, plan, frames, mode=None):
    model = toys.load(name)
    with mode or contextlib.nullcontext():
        chunks = ts.rollout(model, plan, frames=frames, actions="w", first=_first(name))
        seen, made = _seen(), []
        for chunk in chunks:
            assert _seen() == seen
            made.append(chunk.frames)
    return np.concatenate(made)


@functools.cache
def _plain(name, plan, frames):
    """The video, and where its making left a dtype to torch's default."""
    mode = Undecided()
    return _play(name, plan, frames, mode), mode.found


FLOAT64, BFLOAT16 = (torch.float64, False, 1), (torch.bfloat16, True, 2)


def _cases():
    for setting in (FLOAT64, BFLOAT16):
        for case in [*SHIPPED, *TOYS]:
            # a toy's plans by one setting, of the slower toy a few of them
            quick = case in (SEVERAL if setting is FLOAT64 else OFTEN) and case not in RARE
            marks = [] if quick else [pytest.mark.slow]
            yield pytest.param(*case, setting, marks=marks, id=f"{case[0]} {case[1]} {setting[0]}")


@pytest.mark.parametrize("name, plan, frames, setting", [*_cases()])
def test_a_video_is_the_same_under_the_callers_settings(name, plan, frames, setting):
    want, _ = _plain(name, plan, frames)
    with _settings(*setting):
        before = _seen()
        video = _play(name, plan, frames)
        assert _seen() == before
    assert np.array_equal(video, want)


@pytest.mark.parametrize(
    "name, plan, frames",
    [pytest.param(*case, marks=pytest.mark.slow if case in RARE else ()) for case in TOYS],
)
def test_what_makes_chunks_says_every_dtype(name, plan, frames):
    assert not _plain(name, plan, frames)[1]


def test_these_settings_would_change_what_is_computed_under_them():
    """Else the test above shows nothing."""
    x = torch.linspace(0, 1, 12, dtype=torch.float32).view(3, 4)
    for dtype, autocast, seed in (FLOAT64, BFLOAT16):
        with _settings(dtype, autocast, seed):
            assert torch.zeros(1).dtype == dtype
            assert (x @ x.T).dtype == (torch.bfloat16 if autocast else torch.float32)


class Undecided(TorchFunctionMode):
    """Notes where tensors of floats are made without saying which."""

    names = {"zeros", "ones", "empty", "full", "rand", "randn", "eye", "linspace", "arange",
             "tensor", "as_tensor"}  # fmt: skip

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = getattr(func, "__name__", "") in self.names and (kwargs or {}).get("dtype") is None
        if made and out.is_floating_point() and not isinstance(args[0], torch.Tensor):
            frames = [f for f in traceback.extract_stack() if "/tachyscope/" in f.filename]
            self.found |= {f"{f.filename}:{f.lineno} {f.line}" for f in frames[-1:]}
        return out


def test_a_float_without_a_dtype_is_noted():
    with Undecided() as mode:
        exec(compile("import torch; torch.zeros(2)", "/tachyscope/x.py", "exec"))
        exec(compile("torch.zeros(2, dtype=torch.float32)", "/tachyscope/y.py", "exec"))
    (found,) = mode.found
    assert found.startswith("/tachyscope/x.py:1")


def test_inside_tensors_without_a_dtype_are_float32_and_outside_the_callers():
    state = torch.get_rng_state()
    with _settings(torch.float64, False, 3), own_numerics():
        made = {
            "zeros": torch.zeros(2), "linear": torch.nn.Linear(2, 2).weight, "list": torch.tensor([0.1]),
            "full": torch.full((2,), 0.5), "arange": torch.arange(0, 1, 0.1),
            "number": torch.as_tensor(0.5), "rand": torch.rand(2), "eye": torch.eye(2),
        }  # fmt: skip
        assert {x.dtype for x in made.values()} == {torch.float32}
        whole = torch.tensor([1]), torch.full((2,), 1), torch.arange(3)
        assert {x.dtype for x in whole} == {torch.int64}
        kept = (
            torch.zeros(2, dtype=torch.bfloat16),
            torch.as_tensor(np.zeros(2)),
            torch.zeros(0).double(),
        )
        assert [x.dtype for x in kept] == [torch.bfloat16, torch.float64, torch.float64]
        seen = []
        other = threading.Thread(target=lambda: seen.append(torch.zeros(1).dtype))
        other.start()
        other.join()
        assert seen == [torch.float64], "another thread has its own"
    assert torch.equal(torch.get_rng_state(), state)


def test_inside_random_numbers_are_the_blocks_own():
    drawn = []
    state = torch.get_rng_state()
    for _ in range(2):
        with own_numerics(3):
            drawn.append([torch.rand(2), torch.empty(2).normal_(), torch.nn.Linear(2, 2).weight])
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(*pair) for pair in zip(*drawn, strict=True))
    assert torch.equal(drawn[0][0], torch.rand(2, generator=torch.Generator().manual_seed(3)))


@pytest.mark.slow
def test_loading_leaves_the_global_generator_alone_and_works_under_another_device():
    for name in ("atrium-world", "atrium-tokens", "toy-chunks", "toy-tokens"):
        before = torch.get_rng_state()
        plain = ts.load(name)
        assert torch.equal(torch.get_rng_state(), before), name
        with torch.device("meta"):
            assert ts.load(name).fingerprint == plain.fingerprint


def test_threads_share_a_model_and_leave_the_callers_random_numbers_alone():
    model, plans = ts.load("toy-chunks"), ("dense", "fast", "fast-ar")

    def play(plan):
        return np.concatenate([c.frames for c in ts.rollout(model, plan, frames=9, seed=4)])

    alone, together = {plan: play(plan) for plan in plans}, {}
    state = torch.get_rng_state()
    want = torch.rand(500)
    torch.set_rng_state(state)
    threads = [
        threading.Thread(target=lambda plan=plan: together.update({plan: play(plan)}))
        for plan in plans
    ]
    with _settings(torch.float64, False, 1):
        torch.set_rng_state(state)
        for thread in threads:
            thread.start()
        drawn = [torch.rand((), dtype=torch.float32) for _ in range(500)]
        for thread in threads:
            thread.join()
    assert torch.equal(torch.stack(drawn), want)
    assert together.keys() == alone.keys()
    assert all(np.array_equal(together[plan], alone[plan]) for plan in plans)
