"""Several ranks make the video that one process makes, and end together."""

import functools
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import rank
import torch
from faults import refused
from safetensors.torch import load_file

from tachyscope.core.plan import NAMES, Plan
from tachyscope.core.ranks import Ranks
from tachyscope.models.toys import toy_chunks, toy_tokens

RANKS = 2
LIMIT = 170  # seconds; the machine of a test may be busy


def ranks(folder, work, *more):
    """Two processes that do a work of rank.py: the exit code and stderr of each."""
    command = [sys.executable, rank.__file__]
    at_once = [
        subprocess.Popen(
            [*command, str(i), str(RANKS), str(folder), work, *more],
            stderr=subprocess.PIPE, text=True,
        )
        for i in range(RANKS)
    ]  # fmt: skip
    try:
        told = [one.communicate(timeout=LIMIT)[1] for one in at_once]
    finally:
        for one in at_once:
            one.kill()
    return [(one.returncode, text) for one, text in zip(at_once, told, strict=True)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What both ranks made: tensors by name, and what they told."""
    folder = tmp_path_factory.mktemp("ranks")
    ended = ranks(folder, "videos")
    assert [code for code, _ in ended] == [0, 0], ended
    return [(load_file(folder / f"{i}.safetensors"), text) for i, (_, text) in enumerate(ended)]


@functools.cache
def alone(plan):
    return rank.video(rank.PLANS[plan])


def near(ours, theirs, most=1e-9):
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= most


@pytest.mark.parametrize("plan", rank.PLANS)
@pytest.mark.slow
def test_two_ranks_make_the_video_of_one_process(made, plan):
    assert {*NAMES} <= {*rank.PLANS}
    for mine, _ in made:
        near(mine[f"{plan}.latents"], alone(plan)["latents"])
        assert torch.equal(mine[f"{plan}.frames"], alone(plan)["frames"])


@pytest.mark.parametrize("plan", rank.PLANS)
@pytest.mark.slow
def test_a_rank_holds_half_of_the_heads_and_of_the_cache(made, plan):
    for mine, _ in made:
        for name in ("heads", "held"):
            assert RANKS * mine[f"{plan}.{name}"] == alone(plan)[name]


@pytest.mark.parametrize("plan", ["dense", "stock", "lossless", "balanced", "fast", "live"])
@pytest.mark.slow
def test_the_ranks_together_do_the_work_of_one_process(made, plan):
    for mine, _ in made:
        assert torch.equal(mine[f"{plan}.work"], alone(plan)["work"])


@pytest.mark.slow
def test_in_float32_two_ranks_differ_by_rounding(made):
    one = rank.video("fast", dtype=torch.float32)["latents"]
    for mine, _ in made:
        near(mine["float32.latents"], one, 1e-3)


@pytest.mark.parametrize("plan", ["fast", "fast-ar"])
@pytest.mark.slow
def test_ranks_change_their_prompt_together(made, plan):
    one = rank.switched(plan)["latents"]
    unchanged = alone(plan)["latents"][:, :, : one.shape[2]]
    assert (one - unchanged).abs().max() > 1e-3
    for mine, _ in made:
        near(mine[f"{plan}, switched.latents"], one)


@pytest.mark.slow
def test_ranks_make_a_batch(made):
    one = rank.batch()["latents"]
    for mine, _ in made:
        near(mine["batch.latents"], one)


@pytest.mark.slow
def test_ranks_go_on_from_their_own_snapshots_to_the_bit(made):
    one = alone("balanced")["latents"]
    for mine, told in made:
        near(mine["resumed.latents"], one[:, :, : mine["resumed.latents"].shape[2]])
        for name in ("again", "anew"):
            assert torch.equal(mine[f"resumed.{name}"], mine["resumed.rest"])
        assert "rank" in told.splitlines()[0]  # the snapshot of another


@pytest.mark.slow
def test_what_ranks_cannot_do_is_one_line(made):
    for _, told in made:
        _, seeds, shared, tokens, mesh, actions = told.splitlines()
        assert "same seed" in seeds and "rank 1" in seeds
        assert "heads=each" in shared
        assert "toy-tokens" in tokens and "one process" in tokens
        assert "init_device_mesh" in mesh
        assert "same actions" in actions


@pytest.mark.slow
def test_a_rank_that_ends_ends_the_others_in_one_line(tmp_path):
    begun = time.monotonic()
    (first, told), (second, silent) = ranks(tmp_path, "dies")
    assert (first, second) == (2, 9) and silent == ""
    assert told.count("\n") == 1 and "rank 0 of 2 has lost another" in told
    assert time.monotonic() - begun < 60  # not the time that a rank is waited for


@pytest.mark.slow
def test_a_rank_that_does_not_answer_is_waited_for_so_long_and_no_longer(tmp_path):
    (code, told), _ = ranks(tmp_path, "hangs", "5")
    assert code == 2
    assert told.count("\n") == 1 and "rank 0 of 2 has lost another" in told


@pytest.mark.slow
def test_torchrun_generates_one_video(tmp_path):
    words = ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    clean = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    words += ["--master-port", str(29500 + os.getpid() % 2000), "-m", "tachyscope", "generate"]
    words += ["toy-chunks", "--frames", "24", "--out", str(tmp_path)]
    ended = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=LIMIT, env=clean
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("24 frames of") == 1
    assert sorted(x.name for x in Path(tmp_path).iterdir()) == ["generate.json", "video.mp4"]


def of(size):
    """The first of so many ranks, where nothing is sent."""
    mesh = SimpleNamespace(
        get_local_rank=lambda: 0, size=lambda: size, get_group=lambda: None, device_type="cpu"
    )
    return Ranks(mesh)


def test_heads_that_ranks_do_not_divide_are_refused():
    shape = toy_chunks().shape()
    assert of(4).share(shape).heads == 1
    refused(lambda: of(3).share(shape), "4 heads", "3 ranks", "start 2 or 4")
    refused(lambda: of(2).share(replace(shape, grid=(3, 5))), "15 tokens", "start one process")
    refused(lambda: of(2).share(toy_tokens().shape()), "token by token", "start one process")


def test_a_policy_that_says_nothing_of_heads_is_refused(monkeypatch):
    from tachyscope.cache.window import Window

    shape = replace(toy_chunks().shape(), rank=0, ranks=2)
    plan = Plan.parse("dense cache=window:budget=9f")
    plan.check(shape)
    monkeypatch.setattr(Window, "splits_heads", False)
    refused(lambda: plan.check(shape), "cache=window", "2 ranks", "start one process")
    plan.check(replace(shape, ranks=1))


@pytest.mark.parametrize("verb", ["compare", "bench", "serve"])
def test_other_verbs_are_for_one_process(monkeypatch, capsys, verb):
    from tachyscope.cli import main

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([verb] + (["toy-chunks"] if verb != "bench" else [])) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and f"{verb} runs in one process" in told
