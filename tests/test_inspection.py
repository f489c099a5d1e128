"""What an inspection says is true of hand-made tensors, and looking changes nothing."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import streams
import torch
import toys

import tachyscope as ts
from tachyscope.cli import main
from tachyscope.core.errors import TachyscopeError, TachyscopeWarning
from tachyscope.core.plan import Plan
from tachyscope.core.rollout import rollout
from tachyscope.core.session import Session
from tachyscope.core.types import PassContext, Rope, Shape
from tachyscope.measure.inspection import inspect_model, lines, write
from tachyscope.measure.inspection.neurons import NeuronChange
from tachyscope.measure.inspection.output_change import OutputChange
from tachyscope.measure.inspection.stats import ALIKE, PERCENTS, StatsObserver, alike, mass
from tachyscope.measure.inspection.timing import PARTS

ASKED = {
    "toy-chunks": {"frames": 6, "prompt": "a red room", "actions": "w*4 q*2", "seed": 3},
    "toy-tokens": {"frames": 3, "prompt": "a red room", "actions": "w*3", "seed": 3},
}
NAMES = pytest.mark.parametrize("name", list(ASKED))
STILL = Shape(layers=2, heads=4, kv_heads=2, head_dim=8, width=12, grid=(3, 5), chunk=2, passes=1)


@pytest.fixture(scope="module")
def models():
    return {name: toys.load(name) for name in ASKED}


@pytest.fixture(scope="module")
def documents(models):
    return {name: inspect_model(models[name], **ASKED[name], rounds=2) for name in ASKED}


@torch.inference_mode()
def test_the_top_neurons_share_of_change_is_that_of_a_count_by_hand(models, documents):
    assert documents["toy-chunks"]["neurons"] == []
    rows = documents["toy-tokens"]["neurons"]
    assert [row["layer"] for row in rows] == [0, 1, 2]
    assert all(0.125 < row["top_12.5"] < row["top_25"] < row["top_50"] < 1 for row in rows)
    mlp = models["toy-tokens"].mlps[0]
    watched, rng = NeuronChange([mlp]), torch.Generator().manual_seed(0)
    shape = replace(streams.TOKENS, grid=(1, 2))
    watched.on_open(SimpleNamespace(shape=shape))
    ctx = PassContext(shape, 0, 0, 9, 0, 2, 0, 1, (0.0,))
    frames = torch.randn(3, 1, 2, 64, generator=rng)
    want = torch.zeros(160, dtype=torch.float64)
    for i, x in enumerate(frames):
        watched.on_mlp(ctx, -x, x)  # a draft that was refuted
        watched.on_mlp(ctx, x, x)
        watched.on_commit(ctx, 2)
        if i:
            old, new = (mlp.activations(part)[0].double() for part in (frames[i - 1], x))
            for place in range(2):
                for n in range(160):
                    moved = (new[place, n] - old[place, n]) * mlp.down[:, n].double()
                    want[n] += moved @ moved
    torch.testing.assert_close(watched.changed[0], want)
    top = want.sort(descending=True).values[:40].sum() / want.sum()
    assert watched.table()[0]["top_25"] == pytest.approx(float(top))
    assert "top 12.5 %" in "\n".join(lines(documents["toy-tokens"]))


class Twice:
    """An MLP that is easy to foretell."""

    macs = 1

    def __call__(self, x):
        return 2 * x


def play(session, stream):
    """Feed a session whole chunks: of each layer a (q, k, v, x), by chunk."""
    with torch.inference_mode():
        for chunk in stream:
            pos = session.shape.positions(session.memory.latent_frame, session.shape.chunk)
            session.begin(pos, 0, 1, (0.0,) * session.shape.chunk)
            for layer, (q, k, v, x) in enumerate(chunk):
                session.attend(layer, q, k, v)
                session.mlp(layer, x, Twice())
            session.commit()
    return session


def frame_of(shape, rng):
    """One latent frame's q, k, v [1, H, N, D] and x [1, N, W], for every layer."""

    def draw(*size):
        return torch.randn(*size, generator=rng)

    kv = (1, shape.kv_heads, shape.tokens_per_frame, shape.head_dim)
    return [
        (draw(1, shape.heads, *kv[2:]), draw(*kv), draw(*kv), draw(1, shape.tokens_per_frame, shape.width))
        for _ in range(shape.layers)
    ]  # fmt: skip


def chunk_of(frames):
    """Latent frames as one chunk's tokens."""
    by_layer = zip(*frames, strict=True)
    return [tuple(torch.cat(parts, -2) for parts in zip(*layer, strict=True)) for layer in by_layer]


def observed(shape=STILL, **more):
    rope = Rope(((8, (1.0, 0.0, 0.0)),))
    return Session(shape, Plan(), rope, observers=[StatsObserver(**more)])


def test_mass_does_not_hang_on_how_a_policy_orders_the_past():
    weighed = []
    for attention in ("dense", "ann:read=0.5,block=2"):
        plan = Plan.parse(f"dense text=none cache=merge:budget=8f attention={attention}", "chunks")
        session = Session(
            streams.CHUNKS, plan, streams.ROPE, dtype=torch.float64, observers=[StatsObserver()]
        )
        streams.play(session, 6)
        weighed.append([x.values for x in session.observers[0].found["mass"]])
    assert len(weighed[0]) == len(weighed[1]) > 0
    for ours, theirs in zip(*weighed, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name, plan",
    [
        ("toy-chunks", "dense"),
        ("toy-tokens", "fast"),
        pytest.param("toy-chunks", "fast", marks=pytest.mark.slow),
        pytest.param("toy-tokens", "dense", marks=pytest.mark.slow),
    ],
)
def test_an_observed_rollout_makes_the_frames_of_a_plain_one(models, name, plan):
    model, asked = models[name], ASKED[name]
    made = []
    inspect_model(
        model, plan, **asked, rounds=1, watch=lambda run, chunk: made.append((run, chunk.frames))
    )
    plain = np.concatenate([chunk.frames for chunk in rollout(model, plan, **asked)])
    for run in ("observed", "timed 1"):
        assert np.array_equal(np.concatenate([x for kind, x in made if kind == run]), plain)


def test_an_observed_session_keeps_and_counts_what_a_plain_one_does(models):
    model = models["toy-tokens"]
    shape = model.shape()
    first = model.encode_frames(np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), np.uint8))
    states, rows = [], []
    for observers in ([], [StatsObserver()]):
        session = Session(
            shape, Plan(), model.rope(shape), lengths=(2, 2), seed=1, observers=observers
        )
        ts.Stream(model, session).refill(first, "x", "w w")
        rows += [
            chunk.stats | dict.fromkeys(("chunk_ms", "host_ms", "decode_ms"), 0)
            for chunk in rollout(model, stream=ts.Stream(model, session), frames=1)
        ]
        states.append(session.state())
    assert rows[0] == rows[1]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_the_cosine_of_a_frozen_stream_is_one_and_its_difference_nought(rng):
    frozen = chunk_of([frame_of(STILL, rng)] * 2)
    session = play(observed(), [frozen] * 3)
    for kind in ("mlp", "query", "key"):
        # five adjacent pairs of six latent frames, in each of two layers
        assert len(session.observers[0].found[kind]) == 10
        values = torch.cat([record.values for record in session.observers[0].found[kind]])
        assert torch.allclose(values[:, 0], torch.ones(len(values), dtype=torch.float64))
        assert values[:, 1].abs().max() == 0
        # another place is another vector
        assert values[:, 2].abs().max() < 0.999
    turned = torch.cat([record.values for record in session.observers[0].found["key_rotated"]])
    assert turned[:, 0].max() < 1  # the same key at a later time is turned away from itself


def test_adjacent_frames_are_compared_within_chunks_and_across_them(rng):
    frames = [frame_of(STILL, rng) for _ in range(4)]
    session = play(observed(), [chunk_of(frames[:2]), chunk_of(frames[2:])])
    assert session.observers[0].places == list(range(STILL.tokens_per_frame))
    for record in session.observers[0].found["mlp"]:
        old, new = (2 * frames[record.frame - i][record.layer][3][0].double() for i in (1, 0))
        cosine = torch.cosine_similarity(old, new, -1)
        assert torch.allclose(record.values[:, 0], cosine)
        assert torch.allclose(record.values[:, 1], (old - new).norm(dim=-1) / new.norm(dim=-1))
    assert sorted({record.frame for record in session.observers[0].found["mlp"]}) == [1, 2, 3]


def test_a_token_at_a_time_is_compared_like_a_frame_at_once(models):
    model = models["toy-tokens"]
    shape = model.shape()
    latents = model.encode_frames(
        np.random.default_rng(1).integers(0, 256, (3, 32, 32, 3), np.uint8)
    )
    sessions = []
    for one_by_one in (False, True):
        observers = [StatsObserver(places=5, queries=3)]
        session = Session(shape, Plan(), model.rope(shape), lengths=(2, 2), observers=observers)
        ts.Stream(model, session).refill(latents[:, :2], "x", "w w")
        with torch.inference_mode():
            (model.score if one_by_one else model.prefill_latents)(session, latents[:, 2:], [1])
            session.commit()
        sessions.append(session)
    for kind in (*ALIKE, "mass"):
        whole, single = (
            torch.cat(
                [r.values for r in s.observers[0].found[kind] if r.layer == 2 and r.frame == 2]
            )
            for s in sessions
        )
        assert len(whole) == (6 if kind == "mass" else 10)  # two rows
        assert torch.allclose(whole.mean(0), single.mean(0), atol=1e-5)


def test_means_over_heads_are_means_of_each_head_s_own_cosine(rng):
    old, new = (torch.randn(1, 1, 2, 3, 4, generator=rng) for _ in range(2))
    by_head = torch.cosine_similarity(old.double(), new.double(), -1)
    assert torch.allclose(alike(old, new)[..., 0], by_head.mean(-1))


def test_sharp_attention_puts_all_mass_on_one_key():
    q = torch.zeros(1, 2, 3, 4)
    q[..., 0] = 400.0
    k = torch.zeros(1, 1, 50, 4)
    k[:, :, 7, 0] = 1.0
    assert torch.equal(mass(q, k), torch.ones(1, 2, 3, len(PERCENTS), dtype=torch.float64))


def test_even_attention_gives_every_key_its_share():
    held = mass(torch.zeros(1, 1, 1, 4), torch.randn(1, 1, 200, 4))
    assert torch.allclose(held[0, 0, 0], torch.tensor(PERCENTS, dtype=torch.float64) / 100)


def test_a_share_of_the_keys_is_rounded_up_to_whole_ones():
    held = mass(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 10, 4))[0, 0, 0]
    expected = [math.ceil(percent / 10) / 10 for percent in PERCENTS]
    assert held.tolist() == pytest.approx(expected)


def test_shares_are_of_the_keys_that_a_query_sees():
    # of 40 slots 20 are empty, and the first query does not see the last ten
    log_count = torch.zeros(1, 1, 40)
    log_count[..., :20] = -math.inf
    held = mass(
        torch.zeros(1, 1, 2, 4), torch.randn(1, 1, 40, 4), log_count, torch.tensor([30, 40])
    )
    assert held[0, 0, :, PERCENTS.index(5)].tolist() == pytest.approx([1 / 10, 1 / 20])
    assert held[..., -1].flatten().tolist() == pytest.approx([1.0, 1.0])


def test_an_entry_that_stands_for_several_weighs_as_much_as_they():
    log_count = torch.zeros(1, 1, 10)
    log_count[..., 3] = math.log(91.0)
    held = mass(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 10, 4), log_count)
    assert held[0, 0, 0, PERCENTS.index(10)] == pytest.approx(0.91)


@NAMES
def test_mass_rises_with_the_share_of_keys_up_to_all_of_it(documents, name):
    found = documents[name]
    kinds = ["mass"] + ["prompt_mass"] * (name == "toy-chunks")
    for row in found["rows"] + found["layers"] + found["frames"] + found["cells"]:
        for kind in kinds:
            held = [row[f"{kind}_{percent}"] for percent in PERCENTS]
            assert held == sorted(held)
            assert held[-1] == pytest.approx(1.0)
            assert all(x >= p / 100 - 1e-9 for x, p in zip(held, PERCENTS, strict=True))


@NAMES
def test_shares_of_time_and_of_work_sum_to_one(documents, name):
    found = documents[name]
    for row in found["rows"] + found["time"]:
        for measure in ("time", "work"):
            shares = [row[f"{measure}_{part}"] for part in PARTS]
            assert sum(shares) == pytest.approx(1.0)
            assert min(shares) >= 0
    row = found["rows"][0]
    for part in PARTS:
        assert row[f"time_{part}_low"] <= row[f"time_{part}"] <= row[f"time_{part}_high"]


def test_context_is_how_many_keys_a_query_of_the_dense_model_sees(documents, models):
    places = models["toy-chunks"].shape().tokens_per_frame
    assert [row["context"] for row in documents["toy-chunks"]["time"]] == [3 * places, 6 * places]
    tokens = models["toy-tokens"].shape().tokens_per_frame
    contexts = [row["context"] for row in documents["toy-tokens"]["time"]]
    assert np.diff(contexts).tolist() == [tokens, tokens]


@NAMES
def test_every_layer_frame_and_pass_has_its_row(documents, models, name):
    found, shape = documents[name], models[name].shape()
    assert [row["layer"] for row in found["layers"]] == list(range(shape.layers))
    assert [row["pass"] for row in found["passes"]] == list(range(shape.passes))
    latents = list(range(ASKED[name]["frames"]))
    assert [row["frame"] for row in found["frames"]] == latents
    cells = [(row["layer"], row["frame"]) for row in found["cells"]]
    assert cells == [(layer, frame) for layer in range(shape.layers) for frame in latents]
    assert not {key for key in found["frames"][0] if key.endswith("cosine")}
    assert all(f"{kind}_cosine" in row for row in found["frames"][1:] for kind in ALIKE)


def test_the_same_seed_finds_the_same(documents, models):
    again = inspect_model(models["toy-tokens"], **ASKED["toy-tokens"], rounds=1)
    for table in ("layers", "frames", "passes", "cells"):
        assert again[table] == documents["toy-tokens"][table]


def test_given_frames_count_in_the_table_of_frames_alone(models):
    first = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), np.uint8)
    found = inspect_model(
        models["toy-tokens"], frames=1, first=first, first_actions="w w", rounds=1
    )
    assert [row["given"] for row in found["frames"]] == [True, True, False]
    assert {row["frame"] for row in found["cells"]} == {2}
    made = found["frames"][2]
    assert found["rows"][0]["mlp_cosine"] == pytest.approx(made["mlp_cosine"])


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"frames": 0}, "`frames` must be from 1 to 1,000,000, got 0"),
        ({"frames": 2, "rounds": 0}, "`rounds` must be from 1 to 1,000, got 0"),
        ({"frames": 2, "queries": 0}, "`queries` must be from 1 to 4,096, got 0"),
        ({"frames": 2, "places": 1}, "`places` must be from 2 to 65,536, got 1"),
        ({"frames": 1}, "adjacent frames need two latent frames, got 1: raise frames"),
    ],
    ids=str,
)
def test_a_fault_says_what_to_do(models, asked, message):
    with pytest.raises(TachyscopeError, match=f"^{message}$"):
        inspect_model(models["toy-tokens"], **asked)


def test_the_lines_tell_time_likeness_and_mass_by_layer(documents):
    text = "\n".join(lines(documents["toy-chunks"]))
    assert text.startswith("toy-chunks 64x96, 6 frames after 0 given, torch ")
    for words in ("Share of the time", "Cosine to the same place", "Attention mass", "  prompt  "):
        assert words in text
    assert "  prompt  " not in "\n".join(lines(documents["toy-tokens"])).split("Attention mass")[1]


@pytest.mark.slow
def test_the_verb_writes_the_plots_and_a_document(tmp_path, capsys):
    out = tmp_path / "out"
    words = ["inspect", "toy-tokens", "--frames", "2", "--out", str(out)]
    assert main(words) == 0
    printed = capsys.readouterr().out.splitlines()
    found = json.loads((out / "inspect.json").read_text())
    assert (found["schema"], found["suite"]) == (1, "inspect")
    assert found["command"].startswith("tachyscope inspect toy-tokens --frames 2")
    plots = {f"{name}.{end}" for name in ("time", "similarity", "mass") for end in ("png", "svg")}
    assert {path.name for path in out.iterdir()} == plots | {"inspect.json"}
    assert all(str(out / name) in printed for name in plots)
    for name in plots:
        head = (out / name).read_bytes()[:200]
        assert head.startswith(b"\x89PNG") if name.endswith("png") else b"<?xml" in head


def test_without_matplotlib_there_are_no_plots_and_that_is_told(documents, tmp_path, monkeypatch):
    monkeypatch.setattr("tachyscope.measure.inspection.find_spec", lambda name: None)
    with pytest.warns(TachyscopeWarning, match="^the plots are drawn by matplotlib: pip install"):
        assert write(documents["toy-tokens"], tmp_path) == [tmp_path / "inspect.json"]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--world", "1:0"], "--world's given frames must be from 1 to 2,000, got 0"),
        (["--first", "a.png"], "--first is for --fit-neurons, got a.png alone: leave it out"),
    ],
    ids=" ".join,
)
def test_a_fault_of_the_verb_is_one_line_and_leaves_no_file(words, message, tmp_path, capsys):
    assert main(["inspect", "toy-tokens", "--out", str(tmp_path / "out"), *words]) == 2
    assert capsys.readouterr() == ("", f"tachyscope: {message}\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["chunks", "tokens"])
def test_dense_attention_changes_nothing_and_a_window_what_it_leaves_out(models, kind):
    """By hand: the output over the entries that a window keeps against that over all of them."""
    name = f"toy-{kind}"
    found = {}
    for plan in ("dense", "cache=keep_all attention=window:tokens=3"):
        change = OutputChange(queries=10**6)
        frames = 8 if kind == "chunks" else 1
        stream = ts.open(models[name], plan, frames=frames, prompt="a b", observers=[change])
        for _ in rollout(models[name], frames=frames, stream=stream):
            pass
        found[plan] = change
    dense, window = found.values()
    rows = dense.table()
    assert [row["layer"] for row in rows] == list(range(models[name].shape().layers))
    assert max(row["change"] for row in rows) < 1e-5
    assert min(row["change"] for row in window.table()) > 0.01


def test_the_change_of_one_layer_is_that_of_a_sum_by_hand(models):
    class ByHand(OutputChange):
        def on_attend(self, ctx, q, k, v, rotated_q, out):
            super().on_attend(ctx, q, k, v, rotated_q, out)
            if ctx.layer == 1 and ctx.past:
                keys = torch.cat([x[0] for x in self.entries[1]], 2)
                values = torch.cat([x[1] for x in self.entries[1]], 2)
                now = self.session.memory.layers[1].now(ctx)
                every = [torch.cat(pair, 2) for pair in zip((keys, values), now, strict=True)]
                want = torch.nn.functional.scaled_dot_product_attention(rotated_q, *every)
                off = (out - want).norm(dim=-1) / want.norm(dim=-1)
                torch.testing.assert_close(
                    self.found[1][-1].float(), off.flatten(), rtol=1e-3, atol=1e-5
                )
                self.checked = True

    observer = ByHand(queries=10**6)
    model = models["toy-chunks"]
    stream = ts.open(model, "cache=window:budget=6f", frames=15, observers=[observer])
    for _ in rollout(model, frames=15, stream=stream):
        pass
    assert observer.checked
    assert observer.table()[1]["change_p95"] > observer.table()[1]["change"] > 0.05
