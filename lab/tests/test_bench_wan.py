"""The benchmark of full-size models, on a toy: what runs on a GPU has run here before."""

import dataclasses
import json

import pytest
import torch
from toys import open_session

import tachyscope as ts
import tachyscope_lab.bench.wan as wan
from tachyscope.core.arguments import parse_plan
from tachyscope.core.rollout import rollout
from tachyscope.io.results import Parts
from tachyscope.measure.fill import fill
from tachyscope.memory.predict import need
from tachyscope.models.atrium.world import ACTIONS
from tachyscope.models.registry import load
from tachyscope.models.wan.model import WanModel
from tachyscope.models.wan.presets import PRESETS
from tachyscope.models.wan.random import random_wan
from tachyscope.models.wan.transformer import WanCausal
from tachyscope_lab.bench import rollout as rollout_rate
from tachyscope_lab.bench.recorded_kv import Traced, enlarge, record
from tachyscope_lab.bench.rollout import bench_rollout, finite, flat_lines, flatness
from tachyscope_lab.bench.single_chunk import parts, repeat_chunk, watched
from tachyscope_lab.bench.wan import bench_wan, default_lengths, load_sized
from tachyscope_lab.bench.wan_lines import wan_lines
from tachyscope_lab.bench.wan_rows import ALL, HEADLINE, MAIN, choose_rows
from tachyscope_lab.cli.app import main as run_lab

PARTS = ["read", "choose", "enter", "cross", "mlp", "commit", "index", "rest"]
SMALL = "cache=merge:budget=8f attention=ann:read=0.6,block=4 text=pads"


def main(words):
    return run_lab(["bench", *words])


@pytest.fixture(scope="module")
def model():
    return load("toy-chunks")


@pytest.fixture(scope="module")
def found(model):
    told = []
    plans = {"dense": "dense", "window21": "cache=window:budget=21f", "headline": HEADLINE}
    found = bench_wan(model, plans, lengths=[24, 60], rounds=4, on_row=told.append)
    assert [len(document["rows"]) for document in told] == [1, 2, 3]
    return found


def test_every_row_is_measured_at_every_length(found):
    dense, window, ours = found["rows"]
    assert found["suite"] == "bench-wan-cpu" and dense["size"] == "64x96"
    # a chunk is taken back where nothing is forgotten, so that each round has the same length
    assert [p["length"] for p in dense["points"]] == [0, 24, 60]
    for row in found["rows"]:
        assert "failed" not in row
        assert all(p["chunk_ms"] > 0 and 0 < p["density"] <= 1 for p in row["points"])
        assert all(p["aa"][0] <= 1 <= p["aa"][1] for p in row["points"][1:])
        assert row["first_chunk_ms"] > row["points"][0]["chunk_ms"]
        assert list(row["parts_ms"]) == PARTS
        assert row["fit_gb"] > 0 and row["read_tflops"] >= row["chosen_tflops"] > 0
    # dense reads more the longer it is, the others the same
    macs = [[p["macs"] for p in row["points"][1:]] for row in found["rows"]]
    assert macs[0][0] < macs[0][1] and macs[1][0] == macs[1][1] and macs[2][0] == macs[2][1]
    assert ours["parts_ms"]["commit"] > 0 and ours["parts_ms"]["index"] > 0


def test_retrieval_by_pose_is_timed_where_a_camera_is_known(model):
    config = dataclasses.replace(model.config, actions=ACTIONS)
    found = bench_wan(random_wan(config), {"pose": "pose"}, lengths=[24], rounds=2)
    row = found["rows"][0]
    assert "failed" not in row and row["points"][1]["fetched_mb"] > 0
    # 24 filled, three chunks of warming and two timed: 13 of 39 latent frames are read
    assert row["points"][1]["density"] == pytest.approx(13 / 39)
    played = bench_rollout(random_wan(config), {"pose": "pose"}, frames=60)["rows"][0]
    assert played["finite"] and played["late_share"] == 0


def test_a_rate_is_the_sum_over_a_rollouts_chunks(found, model):
    dense, window, ours = found["rows"]
    assert dense["rates"] == {}  # it was not measured that far
    last = ours["points"][-1]
    # what is made while the cache fills, and until a chunk can be repeated, is timed as it comes
    assert "begin_ms" not in dense
    for row in (window, ours):
        assert len(row["begin_ms"]) == 7 + 3 and min(row["begin_ms"]) > 0
    for frames, rate in ours["rates"].items():
        points = [(p["length"], p["chunk_ms"]) for p in ours["points"]]
        later = [_between(points, 3 * i) for i in range(10, int(frames) // 3)]
        ms = ours["begin_ms"] + later
        assert rate["fps"] == pytest.approx(1e3 * int(frames) / sum(ms), rel=0.01)
        assert rate["fps_end"] == pytest.approx(3e3 / last["chunk_ms"])
        times = ours["times"]["window21"][frames]
        assert times["fps"] == pytest.approx(rate["fps"] / window["rates"][frames]["fps"])
    assert "dense" not in ours["times"]


def _between(points, x):
    """The value at x of straight lines through points in order; beyond the last, the last's."""
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[-1][1]


def test_a_reader_is_told_all_of_it(found):
    said = "\n".join(wan_lines(found))
    for word in ("24: ", "60: ", "frames/s over", "predicted", "commit", "window21 "):
        assert word in said
    assert len(said) < 6000


def test_a_plan_that_fails_does_not_stop_the_others(model):
    plans = {"no": "cache=merge:budget=2f", "yes": "dense"}
    found = bench_wan(model, plans, lengths=[6], rounds=2)
    assert found["rows"][0]["failed"].startswith("cache policy 'merge': budget=2f")
    assert found["rows"][1]["chunk_ms"] > 0
    assert any(line.startswith("no failed: ") for line in wan_lines(found))


def test_what_was_measured_before_memory_ran_out_is_kept(model, monkeypatch):
    def full(session, frames):
        if frames > 20:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")
        fill(session, frames)

    monkeypatch.setattr("tachyscope_lab.bench.wan.fill", full)
    (row,) = bench_wan(model, {"dense": "dense"}, lengths=[9, 30], rounds=2)["rows"]
    assert [p["length"] for p in row["points"]] == [0, 9]
    assert row["failed"].startswith("the GPU's memory ran out: ask for shorter lengths")


def test_a_repeated_chunk_leaves_an_unbounded_cache_as_long_as_it_was(model):
    session = open_session(model, "dense", frames=30)
    with torch.inference_mode():
        made = [ts.Stream(model, session).generate().stats for _ in range(3)]
        before = (
            session.memory.past,
            session.memory.latent_frame,
            session.memory.chunk,
            session.memory.total_entries,
        )
        again = [repeat_chunk(ts.Stream(model, session)) for _ in range(2)]
    assert (
        session.memory.past,
        session.memory.latent_frame,
        session.memory.chunk,
        session.memory.total_entries,
    ) == before
    assert again[0]["pairs"] == again[1]["pairs"] > made[-1]["pairs"]
    assert made[0]["frames"] == 3 and made[0]["host_ms"] > 0
    with torch.inference_mode(), watched(session):
        repeat_chunk(ts.Stream(model, session))
    assert session.memory.latent_frame == before[1]


@pytest.mark.slow
def test_a_plan_that_keeps_an_index_is_given_room_for_all_its_chunks(model, monkeypatch):
    grown = []
    monkeypatch.setattr("tachyscope.core.kv_allocation._grow", lambda *args: grown.append(args))
    plan = "attention=ann:read=0.5,block=4"
    (row,) = bench_wan(model, {"ann": plan}, lengths=[9, 15], rounds=2)["rows"]
    assert "failed" not in row and not grown


@pytest.mark.parametrize("plan", ["dense", SMALL, f"{SMALL} replay=attentive:share=0.5"])
def test_a_watched_chunk_is_the_same_chunk(model, plan):
    def video(watch):
        session = open_session(model, plan, seed=3)
        fill(session, 12)
        with torch.inference_mode():
            if not watch:
                return session, ts.Stream(model, session).generate().stats
            with watched(session):
                return session, ts.Stream(model, session).generate().stats

    (plain, row), (seen, spans) = video(False), video(True)
    assert torch.equal(plain.memory.latents, seen.memory.latents)
    assert {k: spans[k] for k in row if not k.endswith("_ms")} == {
        k: v for k, v in row.items() if not k.endswith("_ms")
    }
    assert seen.plan is not None and seen.plan == plain.plan and "attend" not in vars(seen)
    by_part = parts(seen, spans)
    assert sum(by_part.values()) == pytest.approx(spans["chunk_ms"])
    assert all(by_part[name] > 0 for name in ("read", "enter", "cross", "mlp", "rest"))
    assert (by_part["choose"] > 0) <= (plan != "dense")


def test_rows_are_names_or_plans():
    assert choose_rows("main", None) == MAIN and choose_rows("all", None) == ALL
    assert choose_rows("main", "headline; text=pads") == {
        "headline": HEADLINE,
        "text=pads": "text=pads",
    }
    with torch.device("meta"):
        full = WanModel("shapes", WanCausal(wan.SIZES["wan_1.3b"]))
    shape = full.shape((480, 832))
    for text in ALL.values():
        plan = parse_plan(full, text)
        plan.check(shape)
        slots = plan.cache.capacity(shape, 0, None)
        plan.attention.check(shape, 0, None if plan.cache.grows else slots)
    assert "merge:budget=21f" in HEADLINE and "ann:read=0.2 text=pads replay=none" in HEADLINE


def test_lengths_are_what_the_memory_holds(model):
    shapes = model.on_meta()
    dense, bounded = (parse_plan(model, text) for text in ("dense", "cache=merge:budget=21f"))
    assert default_lengths(shapes, bounded, None, None) == [24, 57, 120]
    assert default_lengths(shapes, dense, None, None) == list(wan.LENGTHS)
    room = need(shapes, dense, frames=99).peak
    lengths = default_lengths(shapes, dense, None, room)
    assert lengths[-1] == 96 and all(length % 3 == 0 for length in lengths)
    # the chunk behind the last length is what just fits
    assert need(shapes, dense, frames=lengths[-1] + 3).peak <= room


def test_a_published_size_is_made_of_random_weights(monkeypatch):
    small = dataclasses.replace(
        wan.SIZES["wan_1.3b"], dim=96, ffn_dim=64, layers=2, heads=4, text_dim=16
    )
    monkeypatch.setitem(wan.SIZES, "wan_1.3b", small)
    made = load_sized("wan_1.3b", None, "cpu", "bfloat16")
    assert made.config == small and made.dtype == torch.bfloat16 and made.name == "wan_1.3b"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["self-forcing", "krea"])
def test_a_checkpoint_alone_is_enough_for_a_clock(name, tmp_path, monkeypatch, capsys):
    small = dataclasses.replace(
        PRESETS[name].config, dim=256, ffn_dim=64, layers=2, heads=2, text_dim=16
    )
    monkeypatch.setitem(PRESETS, name, dataclasses.replace(PRESETS[name], config=small))
    torch.save(random_wan(small).transformer.state_dict(), tmp_path / "model.pt")
    words = f"wan --model {name} --weights {tmp_path / 'model.pt'} --device cpu --dtype float32"
    words += f" --rows stock --size 64x96 --rounds 2 --lengths 24 --json {tmp_path / 'x.json'}"
    assert main(words.split()) == 0
    (row,) = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert "failed" not in row and row["chunk_ms"] > 0 and row["model"] == name


def test_memory_that_runs_out_at_once_is_one_line(monkeypatch, capsys):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")

    monkeypatch.setattr(wan, "open_stream", full)
    assert main(["wan", "--model", "toy-chunks", "--device", "cpu", "--dtype", "float32"]) == 2
    assert capsys.readouterr().err.startswith("tachyscope: the memory is not enough: give")


@pytest.mark.slow
def test_a_rollout_says_what_stayed_flat(model, monkeypatch):
    monkeypatch.setattr(rollout_rate, "SETTLED", 30)
    plans = {"headline": "cache=merge:budget=9f text=pads", "dense": "dense"}
    found = bench_rollout(model, plans, frames=90)
    ours, dense = found["rows"]
    assert ours["frames"] == ours["latents"] == 90 and ours["finite"]
    assert len(ours["chunk_ms"]) == len(ours["macs"]) == 30
    assert ours["work_equal"] and not dense["work_equal"] and not dense["flat"]
    assert ours["fps"] >= ours["fps_wall"] > 0
    said = flat_lines(found)
    assert said[0].startswith("headline: 90 frames (90 latent) of 64x96 by toy-chunks")
    assert "counted work equal" in said[1] and "NOT equal" in said[3]


@pytest.mark.slow
def test_a_rollout_of_a_bank_says_what_was_fetched(model, monkeypatch):
    monkeypatch.setattr(rollout_rate, "SETTLED", 30)
    plan = "cache=bank:resident=12f,budget=45f,host=int4 attention=ann:read=0.5 text=pads"
    found = bench_rollout(model, {"bank": plan}, frames=45)
    (row,) = found["rows"]
    assert row["work_equal"] and row["finite"] and row["host_gb"] > 0
    assert len(row["fetched_mb_all"]) == 15 and max(row["fetched_mb_all"]) > 0
    assert 0 <= row["late_share"] < 0.2 and 0 <= row["denied_share"] < 0.5
    assert "MB fetched a chunk" in flat_lines(found)[1]
    (traced,) = bench_rollout(model, {"bank": plan}, frames=45, traced=True)["rows"]
    assert traced["traced"] and not row["traced"] and traced["finite"]
    assert traced["macs"] == row["macs"]
    assert traced["fetched_mb_all"] != row["fetched_mb_all"], "other contents want other blocks"


def test_flat_is_time_work_and_memory():
    level, work = [100.0, 101.0] * 50, [7.0] * 100
    assert flatness(level, work, [10.0, 10.1])["flat"]
    assert flatness([*level[:-1], 300.0], work, [10.0, 10.1])["slowest"] > 2.9
    assert not flatness([x + i / 10 for i, x in enumerate(level)], work, [10.0, 10.0])["flat"]
    assert not flatness(level, [*work[:-1], 8.0], [10.0, 10.0])["flat"]
    assert not flatness(level, work, [10.0, 10.3])["flat"]


def test_a_number_that_is_none_is_found(model):
    session = open_session(model, "dense", frames=12)
    for _ in rollout(model, frames=6, stream=ts.Stream(model, session)):
        pass
    assert finite(session)
    with torch.inference_mode():
        session.memory.layers[1].v[0, 0, 2, 1] = float("nan")
    assert not finite(session)


@pytest.mark.slow
def test_a_trace_fills_a_larger_model(model):
    session = open_session(model, "dense", frames=9)
    trace, small = record()
    assert len(trace) == 21 and len(trace[0]) == small.layers
    assert trace[0][0][1].shape == (1, small.kv_heads, small.tokens_per_frame, small.head_dim)
    large = enlarge(trace, small, session.shape, session)
    shape = session.shape
    assert len(large) == small.layers and len(large[0][0]) == 7
    q, k, v = (x[2] for x in large[4])
    assert q.shape == v.shape == (1, shape.heads, shape.max_pass_tokens, shape.head_dim)
    # row 3 of 4 and column 5 of 6, in the second frame, stand at row 6 and column 6 of 8
    assert (shape.grid, small.grid) == ((4, 6), (8, 8))
    want, at, place = trace[7][4], 2 * shape.tokens_per_frame - 1, 6 * 8 + 6
    factor = shape.head_dim / small.head_dim
    dims = min(small.head_dim, shape.head_dim)
    torch.testing.assert_close(k[0, 3, at, :dims], want[1][0, 3, place, :dims] * factor**-0.25)
    torch.testing.assert_close(v[0, 3, at, :dims], want[2][0, 3, place, :dims])
    told = open_session(model, "dense", observers=[Traced(large)])
    fill(told, 3)
    torch.testing.assert_close(
        told.memory.layers[0].v[:, :, : shape.max_pass_tokens], large[0][2][0]
    )


@pytest.mark.slow
def test_the_command_runs_it_and_leaves_a_file(tmp_path, capsys):
    target = tmp_path / "a.json"
    words = "wan --model toy-chunks --device cpu --dtype float32 --size 64x96 --rounds 2"
    assert (
        main([*words.split(), "--rows", "headline", "--lengths", "24", "--json", str(target)]) == 0
    )
    out, err = capsys.readouterr()
    written = json.loads(target.read_text())
    assert written["rows"][0]["name"] == "headline" and not written["traced"]
    assert written["command"].startswith("tachyscope-lab bench wan --model toy-chunks")
    assert err.startswith("headline: ") and "ms a chunk" in err and "peak" in out
    assert main([*words.split(), "--rollout", "12", "--decode", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    (row,) = json.loads(out.splitlines()[-1])["rows"]
    assert row["frames"] == 12 and row["shown_fps"] > 0 and "decoded by preview: " in out
    assert "frames/s" in err
    assert row["decoder"] == "preview" and row["decode_ms"] > 0


@pytest.mark.slow
def test_a_rollout_is_shown_by_a_tiny_decoder(monkeypatch, tmp_path, capsys):
    config = dataclasses.replace(
        PRESETS["self-forcing"].config, dim=96, ffn_dim=64, layers=2, heads=4, in_channels=4,
        text_dim=16, text_len=64, freq_dim=32, size=(2, 2),
    )  # fmt: skip
    tiny = dataclasses.replace(PRESETS["self-forcing"], config=config)
    monkeypatch.setitem(PRESETS, "self-forcing", tiny)
    words = [
        "wan",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--size",
        "16x16",
        "--rows",
        "dense",
        "--no-compile",
        "--json",
        "-",
    ]
    asked = ["--rollout", "12", "--decode", "--decoder"]
    assert main([*words, *asked, "random-tiny"]) == 0
    out, _ = capsys.readouterr()
    (row,) = json.loads(out.splitlines()[-1])["rows"]
    assert row["decoder"] == "taew2_1 (random weights)" and row["size"] == "16x16"
    assert row["decode_ms"] > 0 and row["shown_fps"] > 0
    assert "decoded by taew2_1 (random weights): " in out and "; decoding alone " in out
    for more, fault in (
        (
            ["--rollout", "12", "--decoder", "random-tiny"],
            "random-tiny would decode nothing: give --d",
        ),
        (["--decode"], "a rollout is decoded, got --decode alone: give --rollout too"),
        ([*asked, str(tmp_path / "none.pth")], "no checkpoint file"),
    ):
        assert main([*words, *more]) == 2
        assert fault in capsys.readouterr().err


@pytest.mark.slow
def test_an_interrupted_benchmark_goes_on_with_its_rows(model, tmp_path, monkeypatch):
    path, plans = str(tmp_path / "wan.json"), {"dense": "dense", "fast": "cache=window:budget=6f"}
    measure, timed = wan._measure, []

    def stopped(row, *given):
        timed.append(row["name"])
        if timed == ["dense", "fast"]:
            raise KeyboardInterrupt
        measure(row, *given)

    monkeypatch.setattr(wan, "_measure", stopped)
    asked = {"lengths": [24], "rounds": 2}
    with pytest.raises(KeyboardInterrupt):
        bench_wan(model, plans, **asked, parts=Parts(path, asked))
    (kept,) = json.loads((tmp_path / "wan.json").read_text())["rows"]
    found = bench_wan(model, plans, **asked, parts=Parts(path, asked, resume=True))
    assert timed == ["dense", "fast", "fast"], "dense is not timed again"
    assert [row["name"] for row in found["rows"]] == list(plans)
    assert found["rows"][0]["points"] == kept["points"] and "points" in found["rows"][1]


FAULT_TOY = ["--model", "toy-chunks", "--device", "cpu", "--dtype", "float32"]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--rows", "magic"], "no row 'magic'; there are: dense, stock, "),
        (["--rows", ";"], "rows are separated by ';', got ';': try 'dense;headline'"),
        (["--table", "magic"], "no table 'magic'; there are: main, all"),
        (["--size", "big"], "--size is HEIGHTxWIDTH, got 'big': try 480x832"),
        (["--lengths", "9,x"], "--lengths is latent frames separated by commas, got '9,x'"),
        (["--model", "x", "--device", "cpu"], "no model 'x'; there are: "),
        (["--model", "wan_1.3b", "--weights", "x"], "wan_1.3b is a size, for random"),
        (["--model", "toy-tokens", "--device", "cpu"], "toy-tokens is no Wan-type model"),
        ([*FAULT_TOY, "--rounds", "1"], "--rounds must be 2 or more here, got 1: give as many"),
        ([*FAULT_TOY, "--rollout", "0"], "--rollout must be from 1 to 1,000,000, got 0"),
    ],
)
def test_a_fault_is_one_line(words, message, capsys):
    assert main(["wan", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("tachyscope: ") and said.count("\n") == 1 and message in said
