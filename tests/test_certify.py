"""A certificate is made part by part, goes on where it stopped, and says what did not fit."""

import dataclasses
import json

import pytest
from faults import refused
from test_metrics import randomly

from tachyscope.cli import main
from tachyscope.io.video import read_video
from tachyscope.measure import certify as module
from tachyscope.measure.certify import Protocol, certify, parts_of
from tachyscope.measure.metrics.lpips import Lpips
from tachyscope.measure.metrics.weights import LPIPS
from tachyscope.memory.predict import need
from tachyscope.memory.promise import Promise
from tachyscope.models.checkpoint import write_tensors
from tachyscope.models.registry import load
from tachyscope.models.toys import toy_chunks

PROMPTS = ("a fox", "a lighthouse")
SHORT = Protocol(PROMPTS, frames=6, long_frames=9)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model():
    return load("toy-chunks")


def test_the_published_protocol_is_of_five_prompts_and_four_plans():
    parts = parts_of(Protocol())
    names = [part.name for part in parts]
    assert len(set(names)) == len(names) == 5 * 4 + 1 + 4
    assert names[:3] == ["1-dense-240", "1-dense-again-240", "1-stock-240"]
    assert "1-live-1000" in names and "2-live-1000" not in names
    made = sum(part.frames for part in parts if (part.plan, part.frames) != ("dense", 1000))
    # 5 frames/s with pixels: under half an hour, loading apart
    assert made == 8040 and made / 5 < 1800


@pytest.mark.slow
def test_a_certificate_is_made_and_gone_on_with(model, tmp_path, monkeypatch):
    out, lines = tmp_path / "out", []
    made = []
    measure = module._measure

    def stopping(*given):
        part = given[1]
        if len(made) == 4:
            raise KeyboardInterrupt
        made.append(part.name)
        return measure(*given)

    monkeypatch.setattr(module, "_measure", stopping)
    with pytest.raises(KeyboardInterrupt):
        certify(model, out, protocol=SHORT, tell=lines.append)
    held = json.loads((out / "certificate.json").read_text())
    assert held["unfinished"] and [row["part"] for row in held["rows"]] == made
    monkeypatch.setattr(
        module, "_measure", lambda *given: made.append(given[1].name) or measure(*given)
    )
    told = []
    document = certify(
        model, out, protocol=SHORT, command="as typed", tell=lines.append,
        watch=lambda done, of: told.append((done, of)),
    )  # fmt: skip
    every = sum(part.frames for part in parts_of(SHORT))
    assert {of for _, of in told} == {every} and told[-1][0] == every
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    # the parts that were there are counted at once, the others chunk by chunk
    assert [done for done, _ in told[:2]] == [0, 6] and len(told) > 2 * len(parts_of(SHORT))
    names = [part.name for part in parts_of(SHORT)]
    assert made == names  # none twice
    assert json.loads((out / "certificate.json").read_text()) == document
    assert "unfinished" not in document and document["command"] == "as typed"
    rows = {row["part"]: row for row in document["rows"]}
    assert list(rows) == names
    for name, row in rows.items():
        assert row["frames"] == row["asked"] == len(list(read_video(out / f"{name}.mp4")))
        assert (
            row["promised_ram_gb"] > row["ram_gb"] / 2 and row["fps_avg"] > 0 and row["warm_s"] > 0
        )
        assert {"drift_colour", "drift_contrast", "drift_detail"} <= row.keys()
    # the same frames: a loaded machine's encoder threads now and then write another file of them
    assert rows["1-dense-again-6"]["psnr_dense"] > 45
    assert "psnr_dense" not in rows["1-dense-6"]
    assert rows["1-stock-6"]["compared_frames"] == 6
    assert "metrics-weights" in document["missing"]
    html = (out / "certificate.html").read_text()
    assert "<h2>6 frames</h2>" in html and "dense again" in html and "metrics-weights" in html
    assert (out / "contact.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(read_video(out / "compare.mp4"))) == 6
    assert lines[-1].startswith(f"{len(names)} of {len(names)}: 2-live-6: 6 frames, ")
    # another model's parts are not mixed in
    refused(
        lambda: certify(toy_chunks(seed=1), out, protocol=SHORT, tell=lines.append),
        "measured with other weights",
    )
    other = dataclasses.replace(SHORT, frames=3)
    refused(lambda: certify(model, out, protocol=other, tell=lines.append), "another protocol")


@pytest.mark.slow
def test_what_does_not_fit_is_shorter_or_left_out(model, tmp_path, monkeypatch):
    one = dataclasses.replace(SHORT, prompts=PROMPTS[:1])

    def told(model, plan, frames, prompt):
        return Promise(need(model.on_meta(), plan, frames=frames, prompt=prompt).peak, 0, 0)

    three, six, nine = (told(model, "dense", frames, PROMPTS[0]).vram for frames in (3, 6, 9))
    assert three < six < nine
    monkeypatch.setattr(module, "promise", told)
    monkeypatch.setattr(module, "_limits", lambda device: (six, float("inf")))
    rows = {r["part"]: r for r in certify(model, tmp_path, protocol=one, tell=str)["rows"]}
    assert rows["1-dense-9"]["frames"] == 0 and rows["1-dense-9"]["bounded_by"] == "memory"
    assert rows["1-dense-6"]["frames"] == 6
    assert "does not fit" in (tmp_path / "certificate.html").read_text()
    monkeypatch.setattr(module, "_limits", lambda device: (three, float("inf")))
    found = certify(model, tmp_path / "less", protocol=one, tell=str)
    rows = {row["part"]: row for row in found["rows"]}
    assert rows["1-dense-6"]["frames"] == 3 and rows["1-dense-6"]["asked"] == 6
    assert "3 (what fits)" in (tmp_path / "less" / "certificate.html").read_text()


@pytest.mark.slow
def test_lpips_is_measured_once_its_weights_are_there(tmp_path, monkeypatch):
    model = load("atrium-world")
    one = Protocol(("a red room",), ("dense", "live"), frames=3, long_frames=6)
    assert "missing" in certify(model, tmp_path / "out", protocol=one, tell=str)
    write_tensors(tmp_path / "weights" / LPIPS, randomly(Lpips()).state_dict())
    monkeypatch.setattr(module, "_measure", lambda *_: pytest.fail("made again"))
    found = certify(model, tmp_path / "out", protocol=one, weights=tmp_path / "weights", tell=str)
    rows = {row["part"]: row for row in found["rows"]}
    assert rows["1-dense-again-3"]["lpips_dense"] == 0.0
    assert rows["1-live-6"]["lpips_dense"] >= 0 and "missing" not in found


@pytest.mark.slow
def test_the_verb_makes_a_certificate_of_fixed_form(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "Protocol", lambda: Protocol(PROMPTS[:1], ("dense",), 3, 6))
    assert main(["compare", "toy-chunks", "--certify", str(tmp_path), "--frames", "12"]) == 2
    assert "--frames is not for a certificate, whose form is fixed" in capsys.readouterr().err
    assert main(["compare", "toy-chunks", "--certify", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "2 of 3: 1-dense-again-3" in told and str(tmp_path / "certificate.json") in told
    document = json.loads((tmp_path / "certificate.json").read_text())
    assert document["command"] == f"tachyscope compare toy-chunks --certify {tmp_path}"
