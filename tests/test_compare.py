"""A plan beside dense: same video where nothing is saved, honest sums, whole files or none."""

import json
import re

import numpy as np
import pytest
import torch

import tachyscope.measure.compare as compare_module
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.meter import summary
from tachyscope.core.plan import Plan
from tachyscope.core.rollout import rollout
from tachyscope.io.video import read_video
from tachyscope.measure.compare import compare
from tachyscope.measure.quality import psnr
from tachyscope.measure.take import Take
from tachyscope.models.registry import load

COUNTS = ("frames", "macs", "pairs", "pairs_dense", "text_pairs", "rows_computed", "entries")
ASKED = {"frames": 12, "prompt": "a red room", "actions": "w*4 q*2", "seed": 3}


@pytest.fixture(scope="module")
def model():
    return load("toy-chunks")


def frames_of(model, plan):
    return np.concatenate([chunk.frames for chunk in rollout(model, plan, **ASKED)])


@pytest.mark.slow
def test_runs_by_turns_count_what_each_counts_alone(model):
    found = compare(model, "fast", **ASKED)
    for row, plan in zip(found.document["rows"], ("dense", "fast"), strict=True):
        alone = summary([chunk.stats for chunk in rollout(model, plan, **ASKED)])
        assert {key: row[key] for key in COUNTS} == {key: alone[key] for key in COUNTS}
        assert row["plan"] == str(Plan.parse(plan))


def test_the_sums_are_of_the_meter_and_of_the_frames(model):
    found = compare(model, "fast", **ASKED)
    near = psnr(frames_of(model, "fast"), frames_of(model, "dense"))
    row = found.document["rows"][1]
    assert row["psnr_dense"] == pytest.approx(near.mean())
    assert row["psnr_frames"] == 12
    chunks = [r["psnr_dense"] for r in found.runs[1].rows]
    assert chunks == pytest.approx(near.reshape(-1, 3).mean(1))


@pytest.mark.parametrize("name, frames", [("toy-chunks", 5), ("toy-tokens", 2)])
def test_dense_beside_dense_is_the_same_video(name, frames):
    found = compare(load(name), "dense", frames=frames, prompt="x", aa=False)
    row = found.document["rows"][1]
    assert (row["psnr_dense"], row["psnr_frames"]) == (100.0, frames)
    assert (row["density"], row["sharpness"]) == (1.0, 1.0)
    said = (
        f"Speeds were not compared: noise is unknown without a second run; dense 2 has a PSNR to "
        f"dense of 100.0 dB over {frames} frames (higher is closer). dense 2 scored 100 % of the "
        f"full cache's query-key pairs and did 100 % of dense's counted work."
    )
    assert found.lead == found.document["lead"] == said


@pytest.mark.slow
def test_a_ratio_is_given_only_beside_its_noise(model):
    with_aa, without = (compare(model, "fast", **ASKED, aa=aa).document for aa in (True, False))
    assert 0 < with_aa["aa"]["low"] <= 1 <= with_aa["aa"]["high"]
    plan = with_aa["rows"][1]
    assert plan["ratio_dense_all"] == pytest.approx(with_aa["rows"][0]["wall_ms"] / plan["wall_ms"])
    assert plan["ratio_dense_low"] <= plan["ratio_dense"] <= plan["ratio_dense_high"]
    assert "aa" not in without
    assert not any(key.startswith("ratio") for row in without["rows"] for key in row)


def clocked(monkeypatch, dense, plan):
    """Chunks that take so many ms each by the dense runs and by the plan, whatever they really do."""

    def step(self, watch, timed=True):
        chunk = next(self.chunks)
        wall = dense if self.name.startswith("dense") else plan
        chunk.stats["wall_ms"] = wall[len(self.rows)]
        self.rows.append(chunk.stats)
        self.store.add(chunk.frames)

    monkeypatch.setattr(Take, "step", step)


LONG = {"frames": 30, "prompt": "a red room"}  # 10 chunks, of which 6 fill the cache of fast


@pytest.mark.slow
def test_a_faster_plan_leads_with_by_how_much_and_at_what_cost(model, monkeypatch):
    clocked(monkeypatch, [100.0] * 10, [500.0] * 6 + [50.0] * 4)
    found = compare(model, "fast", **LONG)
    row = found.document["rows"][1]
    assert (row["warm_chunks"], row["steady_chunks"], row["real"]) == (6, 4, True)
    assert found.document["rows"][0]["warm_chunks"] == 6
    assert row["fps_steady"] == pytest.approx(60) and row["ratio_dense_all"] == pytest.approx(
        10 / 32
    )
    assert found.lead.startswith(
        "fast is 2.00x as fast as dense once warm (0.31x over the whole video, dense against itself "
        "1.00x to 1.00x), at a PSNR to dense of "
    )


@pytest.mark.slow
def test_a_plan_that_is_not_faster_leads_with_that_and_with_what_was_measured(model, monkeypatch):
    clocked(monkeypatch, [100.0] * 10, [200.0] * 10)
    # no cause that was not measured
    assert compare(model, "fast", **LONG).lead.startswith(
        "fast is slower than dense here, 0.50x once warm (0.50x over the whole video, dense against "
        "itself 1.00x to 1.00x). It has a PSNR to dense of "
    )
    assert compare(model, "fast", **ASKED).lead.startswith(
        "fast is not measurably faster than dense here, 0.50x once warm (0.50x over the whole "
        "video, dense against itself 1.00x to 1.00x): the video is too short, the cache was never "
        "full and left nothing out; only 2 chunks came after the warm-up of 2, in which kernels are "
        "compiled and the cache fills"
    )
    clocked(monkeypatch, [100.0] * 10, [100.0] * 10)
    found = compare(model, "lossless", **LONG).lead
    assert found.startswith("lossless is not measurably faster than dense here, 1.00x once warm")
    assert re.search(
        r"\): it did 9\d\.\d % of dense's counted work\. It has a PSNR to dense", found
    )


def test_a_busy_machine_is_said_to_be_one_by_its_own_noise(model, monkeypatch):
    walls = {"dense": [100.0, 100.0, 100.0, 160.0], "dense again": [100.0] * 4, "fast": [50.0] * 4}

    def step(self, watch, timed=True):
        chunk = next(self.chunks)
        chunk.stats["wall_ms"] = walls[self.name][len(self.rows)]
        self.rows.append(chunk.stats)
        self.store.add(chunk.frames)

    monkeypatch.setattr(Take, "step", step)
    said = "The machine was too busy or its clock too noisy to tell much: dense against itself"
    assert f"{said} 0.62x to 1.60x." in compare(model, "fast", **ASKED).lead
    walls["dense"] = [100.0] * 4
    assert "too busy" not in compare(model, "fast", **ASKED).lead


@pytest.mark.slow
def test_several_plans_are_held_against_the_first(model, tmp_path):
    plans = ["cache=window:budget=6f", "dense", "dense"]
    found = compare(model, plans, **ASKED, out=tmp_path, aa=False)
    rows = found.document["rows"]
    assert [row["name"] for row in rows] == ["cache=window:budget=6f", "dense", "dense 2"]
    assert found.document["baseline"] == "cache=window:budget=6f"
    assert not any("psnr_dense" in row for row in rows) and "psnr_first" in rows[1]
    assert rows[1]["psnr_first"] == rows[2]["psnr_first"]
    assert all(row["frame_s"] == sorted(row["frame_s"]) for row in rows)
    assert [len(row["frame_s"]) for row in rows] == [12] * 3
    names = sorted(path.name for path in tmp_path.glob("*.mp4"))
    assert names == ["cache-window-budget-6f.mp4", "compare.mp4", "dense-2.mp4", "dense.mp4"]
    # the last picture holds the last frame of every run
    last = frames_of(model, "dense")[-1]
    scale = 256 // min(last.shape[:2])
    video = list(read_video(tmp_path / "compare.mp4"))[-1]
    height, width = (side * scale for side in last.shape[:2])
    strip, gap = 48, 8  # labels of 24 pixels
    seen = video[strip : strip + height, 2 * gap + width : 2 * (gap + width)].astype(int)
    assert np.abs(seen - last.repeat(scale, 0).repeat(scale, 1)).mean() < 8


def test_plans_have_names_of_their_own_where_they_are_given(model):
    plans = {"full cache": "dense", "a window": "cache=window:budget=6f"}
    found = compare(model, plans, **ASKED, aa=False)
    assert [run.name for run in found.runs] == ["full cache", "a window"]
    assert "psnr_dense" in found.document["rows"][1]
    assert "a window has a PSNR to full cache of" in found.lead


@pytest.mark.slow
def test_on_a_gpu_each_run_is_made_alone(model, monkeypatch):
    monkeypatch.setattr(compare_module, "takes_turns", lambda device: False)
    told, open_now = [], []
    real_open, real_close = Take.open, Take.close

    def opened(self, like=None, progress=None):
        real_open(self, like, progress)
        open_now.append(self.name)
        assert len(open_now) == 1 and like is None

    def closed(self):
        real_close(self)
        open_now.remove(self.name)

    monkeypatch.setattr(Take, "open", opened)
    monkeypatch.setattr(Take, "close", closed)
    found = compare(model, "fast", **ASKED, watch=lambda name, chunk: told.append(name))
    assert told == [name for name in ("dense", "fast", "dense again") for _ in range(4)]
    near = psnr(frames_of(model, "fast"), frames_of(model, "dense"))
    assert found.document["rows"][1]["psnr_dense"] == pytest.approx(near.mean())
    assert found.document["aa"]["high"] >= 1


@pytest.mark.slow
def test_every_chunk_of_every_run_is_told(model):
    told = []
    compare(model, "fast", **ASKED, watch=lambda name, chunk: told.append(name))
    assert {name: told.count(name) for name in told} == {"dense": 4, "fast": 4, "dense again": 4}
    # by turns, and nobody always first
    assert told[:3] == told[5:2:-1]


def test_the_folder_gets_videos_a_report_and_the_document(model, tmp_path):
    found = compare(model, "fast", **ASKED, out=tmp_path / "new", command="a command", about="Toy.")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "compare.json", "compare.mp4", "dense.mp4", "fast.mp4", "report.html",
    ]  # fmt: skip
    written = json.loads((tmp_path / "new" / "compare.json").read_text())
    assert written == json.loads(json.dumps(found.document))
    sizes = {}
    for name in ("dense", "fast", "compare"):
        pictures = list(read_video(tmp_path / "new" / f"{name}.mp4"))
        assert len(pictures) == 12 or name == "compare"
        sizes[name] = pictures[0].shape
    assert sizes["dense"] == sizes["fast"] == (64, 96, 3)
    # four times the size, side by side
    assert sizes["compare"][0] > 256 and sizes["compare"][1] > 2 * 384
    report = (tmp_path / "new" / "report.html").read_text()
    assert "toy-chunks: dense, fast" in report and "a command" in report and "Toy." in report


def test_no_run_overwrites_the_video_of_another_or_of_the_comparison(model, tmp_path):
    names = ("compare", "a/b", "A b", "…")
    compare(model, dict.fromkeys(names, "dense"), frames=3, aa=False, out=tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.mp4")) == [
        "A-b-2.mp4", "a-b.mp4", "compare-2.mp4", "compare.mp4", "run.mp4",
    ]  # fmt: skip
    assert len(list(read_video(tmp_path / "compare-2.mp4"))) == 3


@pytest.mark.slow
def test_the_videos_show_the_runs_they_are_named_after(model, tmp_path):
    compare(model, "fast", **ASKED, out=tmp_path, aa=False)
    for plan in ("dense", "fast"):
        video = np.stack(list(read_video(tmp_path / f"{plan}.mp4")))
        near = {p: psnr(video, frames_of(model, p)).mean() for p in ("dense", "fast")}
        assert max(near, key=near.get) == plan


class Torn(Exception):
    """What a fault in the middle raises."""


def test_a_fault_in_the_middle_leaves_no_file(model, tmp_path):
    def watch(name, chunk):
        if chunk.index == 2:
            raise Torn

    with pytest.raises(Torn):
        compare(model, "fast", **ASKED, out=tmp_path, watch=watch)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change, message",
    [
        ({"frames": 0}, "^`frames` must be from 1 to 1,000,000, got 0$"),
        ({"actions": "jump"}, "^`actions`: this model takes letters of '.wsadqe'"),
        ({"actions": "w*13"}, "^`actions` are given for 13 frames, but only 12 are made"),
        ({"size": (63, 96)}, "got 63x96: round it$"),
    ],
)
def test_a_fault_in_what_is_asked_leaves_no_file(model, tmp_path, change, message):
    for aa in (True, False):
        with pytest.raises(TachyscopeError, match=message):
            compare(model, "fast", **ASKED | change, out=tmp_path, aa=aa)
        assert list(tmp_path.iterdir()) == []


def test_a_method_that_saved_nothing_is_in_the_document_and_the_report(model, tmp_path):
    found = compare(model, "fast", **ASKED, out=tmp_path, aa=False)
    note = "cache policy 'bank' saved nothing: the video is shorter than what it may hold"
    assert found.document["rows"][1]["notes"] == [note]
    assert (
        "saved nothing: the video is shorter than what it may hold"
        in (tmp_path / "report.html").read_text()
    )


def test_a_comparison_leaves_the_model_as_it_was(model):
    before = {name: value.clone() for name, value in model.transformer.state_dict().items()}
    attributes = {name: value for name, value in vars(model).items() if name != "model"}
    compare(model, "fast", **ASKED, aa=False)
    after = model.transformer.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert attributes == {name: value for name, value in vars(model).items() if name != "model"}


def test_a_plan_object_is_as_good_as_its_text(model):
    plan = Plan.parse("balanced cache=window:budget=9f")
    found = [compare(model, p, **ASKED, aa=False).document["rows"][1] for p in (plan, str(plan))]
    assert [row["name"] for row in found] == ["plan", "plan"]
    assert [row["pairs"] for row in found] == [found[0]["pairs"]] * 2
