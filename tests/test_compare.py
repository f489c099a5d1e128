"""A plan beside dense: same video where nothing is saved, honest sums, whole files or none."""

import json
import re

import numpy as np
import pytest
import torch

import tachyscope.compare as compare_module
from tachyscope.compare import compare, tell_floor
from tachyscope.errors import TachyscopeError
from tachyscope.meter import summary
from tachyscope.models.registry import load
from tachyscope.models.wan.toy import toy_chunks
from tachyscope.plan import Plan
from tachyscope.quality import psnr
from tachyscope.rollout import rollout
from tachyscope.video import read_video

COUNTS = ("frames", "macs", "pairs", "pairs_dense", "text_pairs", "rows_computed", "entries")
ASKED = {"frames": 12, "prompt": "a red room", "actions": "w*4 q*2", "seed": 3}


@pytest.fixture(scope="module")
def model():
    return load("toy-chunks")


@pytest.fixture(scope="module")
def twin():
    return load("toy-chunks", dtype="float64")


def frames_of(model, plan):
    return np.concatenate([chunk.frames for chunk in rollout(model, plan, **ASKED)])


@pytest.mark.slow
def test_runs_by_turns_count_what_each_counts_alone(model):
    found = compare(model, "fast", **ASKED)
    for row, plan in zip(found.document["rows"], ("dense", "fast"), strict=True):
        alone = summary([chunk.stats for chunk in rollout(model, plan, **ASKED)])
        assert {key: row[key] for key in COUNTS} == {key: alone[key] for key in COUNTS}
        assert row["plan"] == str(Plan.parse(plan))


def test_the_sums_are_of_the_meter_and_of_the_frames(model, twin):
    found = compare(model, "fast", **ASKED, twin=twin)
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
        f"Speeds were not compared: noise is unknown without a second dense run; dense has a PSNR "
        f"to dense of 100.0 dB over {frames} frames (higher is closer). dense scored 100 % of the "
        f"dense model's query-key pairs and did 100 % of its counted work."
    )
    assert found.lead == found.document["lead"] == said


def test_a_float64_twin_agrees_with_float32_all_the_way(model, twin):
    found = compare(model, "dense", **ASKED, twin=twin, aa=False)
    floor = found.document["floor"]
    assert (floor["run"], floor["db"], floor["horizon"]) == ("dense float64", 30.0, None)
    assert floor["psnr"] > 50
    assert tell_floor(found).startswith("Floor: dense float64 has a PSNR to dense of ")
    assert tell_floor(found).endswith(" dB, and nowhere below 30 dB.")


def test_beyond_the_horizon_closeness_is_not_given(model):
    # other weights stand in for a model that rounding alone sends elsewhere
    found = compare(model, "fast", **ASKED, twin=toy_chunks(seed=1, dtype=torch.float64), aa=False)
    assert found.document["floor"]["horizon"] == 0
    assert found.document["floor"]["psnr"] is None
    assert not {"psnr_dense", "psnr_frames"} & found.document["rows"][1].keys()
    assert "dB" not in found.lead
    assert tell_floor(found) == (
        "Floor: dense float64 parts from dense at frame 0 (below 30 dB); "
        "PSNR to dense counts the frames before it alone."
    )


def test_without_a_twin_the_floor_is_said_to_be_unknown(model):
    found = compare(model, "fast", **ASKED, aa=False)
    assert "floor" not in found.document
    assert tell_floor(found) == (
        "Floor not measured: how far closeness to dense can be trusted is unknown."
    )


def test_a_twin_of_the_same_dtype_is_refused(model):
    message = "^a floor needs the model in two dtypes, got float32 twice: load another twin$"
    with pytest.raises(TachyscopeError, match=message):
        compare(model, "fast", **ASKED, twin=model)


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

    def step(self, watch):
        chunk = next(self.chunks)
        wall = plan if self.name == "fast" else dense
        chunk.stats["wall_ms"] = wall[len(self.rows)]
        self.rows.append(chunk.stats)
        return chunk

    monkeypatch.setattr(compare_module._Take, "step", step)


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
def test_a_plan_that_is_not_faster_leads_with_that_and_why(model, monkeypatch):
    clocked(monkeypatch, [100.0] * 10, [200.0] * 10)
    assert compare(model, "fast", **LONG).lead.startswith(
        "fast is slower than dense here, 0.50x once warm and 0.50x over the whole video (dense "
        "against itself 1.00x to 1.00x), because on a CPU choosing what to read costs the time that "
        "reading less saves. It has a PSNR to dense of "
    )
    assert compare(model, "fast", **ASKED).lead.startswith(
        "fast is not measurably faster than dense here, 0.50x once warm and 0.50x over the whole "
        "video (dense against itself 1.00x to 1.00x), because the video is too short: the cache was "
        "never full, and left nothing out; only 2 chunks came after the warm-up of 2, in which "
        "kernels are compiled and the cache fills; on a CPU"
    )
    clocked(monkeypatch, [100.0] * 10, [100.0] * 10)
    found = compare(model, "lossless", **LONG).lead
    assert found.startswith("lossless is not measurably faster than dense here, 1.00x once warm")
    assert re.search(
        r"because it did 9\d\.\d % of dense's counted work\. It has a PSNR to dense", found
    )


@pytest.mark.slow
def test_every_chunk_of_every_run_is_told(model, twin):
    told = []
    compare(model, "fast", **ASKED, twin=twin, watch=lambda name, chunk: told.append(name))
    assert {name: told.count(name) for name in told} == {
        "dense": 4, "fast": 4, "dense float64": 4, "dense again": 4,
    }  # fmt: skip
    # by turns, and nobody always first
    assert told[:4] == told[7:3:-1]


def test_the_folder_gets_videos_a_report_and_the_document(model, tmp_path):
    found = compare(model, "fast", **ASKED, out=tmp_path / "new", command="a command", about="Toy.")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "compare.json", "compare.mp4", "dense.mp4", "plan.mp4", "report.html",
    ]  # fmt: skip
    written = json.loads((tmp_path / "new" / "compare.json").read_text())
    assert written == json.loads(json.dumps(found.document))
    sizes = {}
    for name in ("dense", "plan", "compare"):
        pictures = list(read_video(tmp_path / "new" / f"{name}.mp4"))
        assert len(pictures) == 12
        sizes[name] = pictures[0].shape
    assert sizes["dense"] == sizes["plan"] == (64, 96, 3)
    # four times the size, side by side
    assert sizes["compare"][0] > 256 and sizes["compare"][1] > 2 * 384
    report = (tmp_path / "new" / "report.html").read_text()
    assert "toy-chunks: fast beside dense" in report and "a command" in report and "Toy." in report


@pytest.mark.slow
@pytest.mark.usefixtures("no_plots")
def test_the_videos_show_the_runs_they_are_named_after(model, tmp_path):
    compare(model, "fast", **ASKED, out=tmp_path, aa=False)
    for name, plan in (("dense", "dense"), ("plan", "fast")):
        video = np.stack(list(read_video(tmp_path / f"{name}.mp4")))
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


@pytest.mark.usefixtures("no_plots")
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
    plan = Plan.parse("balanced cache=window:budget=6f")
    found = [compare(model, p, **ASKED, aa=False).document["rows"][1] for p in (plan, str(plan))]
    assert [row["name"] for row in found] == ["plan", "plan"]
    assert [row["pairs"] for row in found] == [found[0]["pairs"]] * 2
