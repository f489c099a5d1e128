"""Which passes run: each paper's rule, stated again here without its code, and what is counted."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from streams import CHUNKS, TOKENS
from test_graph_runner import CONFIG

import tachyscope as ts
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.plan import Plan
from tachyscope.core.types import DenoisePass
from tachyscope.measure.plan_notes import SAVINGS, notes
from tachyscope.models.wan.random import random_wan
from tachyscope.passes import PassRunner
from tachyscope.passes.every_k import EveryKPass
from tachyscope.passes.flowcache import FlowCache
from tachyscope.passes.teacache import TeaCache

STEPS = (1000, 750, 500, 250)


def decisions(policy, passes, cleans):
    """Which passes a runner runs; cleans[i] is what the network would answer in pass i."""
    runner, ran = PassRunner(policy), []
    for now, clean in zip(passes, cleans, strict=True):
        if not runner.skips(now):
            ran.append(now.index)
            runner.clean = clean
    return ran


def by_the_rule(count, threshold, distance):
    """A pass runs at both ends, and where the way from the last that ran is long."""
    ran = []
    for i in range(count):
        way = sum(distance(j - 1, j, ran) for j in range(ran[-1] + 1, i + 1)) if ran else 0
        if i in (0, count - 1) or way >= threshold:
            ran.append(i)
    return ran


def test_teacache_is_its_papers_rule():
    rng = np.random.default_rng(3)
    seen = set()
    for _ in range(60):
        count = int(rng.integers(1, 12))
        times = np.sort(rng.uniform(0, 1000, count))[::-1]
        table = {t: rng.normal(1, 0.2, 16) for t in times}
        threshold = rng.uniform(0.05, 1.5)

        def distance(a, b, ran, table=table, times=times):
            old, new = table[times[a]], table[times[b]]
            return np.abs(new - old).mean() / np.abs(old).mean()

        passes = [
            DenoisePass(i, count, t, 0.5, None, lambda t, w=table: torch.from_numpy(w[t]), None)
            for i, t in enumerate(times)
        ]
        ran = decisions(TeaCache(threshold), passes, [torch.zeros(1)] * count)
        assert ran == by_the_rule(count, threshold, distance)
        seen.add(len(ran) < count)
    assert seen == {True, False}


def test_flowcache_is_its_papers_rule_along_the_ode():
    rng = np.random.default_rng(4)
    seen = set()
    for _ in range(60):
        count = int(rng.integers(1, 12))
        noise = np.sort(rng.uniform(0.05, 1, count))[::-1]
        x, x0 = rng.normal(size=(2, count, 1, 3, 2, 2, 2))
        weight, bias = rng.normal(size=(5, 3)), rng.normal(size=5)
        threshold = rng.uniform(0.1, 3)

        def embed(latents, weight=weight, bias=bias):
            return np.einsum("wc,bcfhx->bfhxw", weight, latents) + bias

        def distance(a, b, ran, x=x, x0=x0, noise=noise, embed=embed):
            # the estimate is that of the last pass that ran, up to the pass before
            clean = x0[max(i for i in ran if i <= a)]
            drawn = (x[a] - (1 - noise[a]) * clean) / noise[a]
            old, new = embed(x[a]), embed((1 - noise[b]) * clean + noise[b] * drawn)
            return np.abs(new - old).mean() / np.abs(old).mean()

        def tokens(latents, embed=embed):
            return torch.from_numpy(embed(latents.numpy()))

        passes = [
            DenoisePass(i, count, 0.0, s, torch.from_numpy(x[i]), None, tokens)
            for i, s in enumerate(noise)
        ]
        ran = decisions(FlowCache(threshold), passes, list(torch.from_numpy(x0)))
        assert ran == by_the_rule(count, threshold, distance)
        seen.add(len(ran) < count)
    assert seen == {True, False}


def test_every_kth_pass_and_the_last_run():
    for count in range(1, 9):
        for k in range(1, 5):
            passes = [DenoisePass(i, count, 0.0, 0.5, None, None, None) for i in range(count)]
            ran = decisions(EveryKPass(k), passes, [torch.zeros(1)] * count)
            assert ran == [i for i in range(count) if i % k == 0 or i == count - 1]


@pytest.mark.slow
def test_four_steps_leave_the_choices_that_the_page_tells():
    model = ts.load("atrium-world")
    count = len(model.levels)
    passes = [
        DenoisePass(x.place, count, x.timestep, x.sigma, None, model.embed_time, None)
        for x in model.levels.values()
    ]
    with torch.inference_mode():
        found = {x: decisions(TeaCache(x), passes, [0] * count) for x in (0.1, 0.107, 0.15, 0.25)}
    assert found == {0.1: [0, 1, 2, 3], 0.107: [0, 1, 3], 0.15: [0, 2, 3], 0.25: [0, 3]}


def play(model, plan, noise, chunks=3):
    stream = ts.open(model, plan, prompt="a b", noise=noise)
    made = [stream.step() for _ in range(chunks)]
    return np.concatenate([x.frames for x in made]), [x.stats for x in made], stream.session


def test_a_skipped_pass_is_a_step_left_out_of_the_schedule():
    """Frames, and all that is counted but what the dense model would have done."""
    long, short = (
        random_wan(dataclasses.replace(CONFIG, steps=steps)) for steps in (STEPS, STEPS[::3])
    )
    shape = long.shape()
    size = long.latent_size(shape, 3 * shape.chunk)
    noise = torch.randn(4, *(size[i] for i in (2, 1, 3, 4)), generator=torch.manual_seed(0))
    frames, rows, _ = play(long, "dense passes=every_k:k=3", noise)
    want, counted, _ = play(short, "dense", noise[::3])
    _, dense, _ = play(long, "dense", noise)
    assert np.array_equal(frames, want)
    for row, like, all_passes in zip(rows, counted, dense, strict=True):
        assert (row["passes"], row["passes_skipped"]) == (4, 2)
        for key in ("pairs", "macs", "rows_computed", "text_pairs", "text_pairs_dense"):
            assert row[key] == like[key], key
        assert row["pairs_dense"] == all_passes["pairs_dense"] == all_passes["pairs"]


@pytest.mark.parametrize(
    "shape, why",
    [
        (TOKENS, "token models run one pass a token"),
        (dataclasses.replace(CHUNKS, rolling_frames=12), "a rolling window runs one pass a chunk"),
    ],
)
def test_models_of_one_pass_refuse_to_skip_any(shape, why):
    message = f"{why}, so none can be skipped, got passes=every_k:k=2: use passes=all"
    with pytest.raises(TachyscopeError, match=f"^{re.escape(message)}$"):
        Plan(passes=EveryKPass(2)).check(shape)


def test_a_policy_that_skipped_nothing_says_so():
    model = random_wan(dataclasses.replace(CONFIG, steps=STEPS))
    _, rows, session = play(model, "dense passes=teacache:threshold=0", None, 1)
    told = "passes policy 'teacache' saved under 1 %: it skipped 0.0% of the passes"
    assert told in notes(session, rows)
    # drafts skip no pass, and save as many as were right
    assert not SAVINGS["passes"](session, {"drafts": 100.0, "drafts_accepted": 50.0})
    wrong = {"drafts": 1000.0, "drafts_accepted": 5.0}
    assert SAVINGS["passes"](session, wrong) == "saved under 1 %: 0.5% of its drafts were right"
