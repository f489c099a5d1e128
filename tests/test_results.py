"""What README and docs/results.md say was measured, by the command beside it, on the shipped weights."""

import json
import re
from pathlib import Path

import pytest

from tachyscope.errors import TachyscopeError
from tachyscope.evaluation.plan_tables import table as plan_table
from tachyscope.results import Parts, document, emit
from tachyscope.weights import RECORD, weights_hashes

ROOT = Path(__file__).parents[1]
README, RESULTS = (ROOT / "README.md").read_text(), (ROOT / "docs" / "results.md").read_text()
FILES = ROOT / "bench" / "results"
NONE = "–"


@pytest.fixture(scope="module")
def quality():
    newest = max(FILES.glob("atrium-world-readme-*-h200.json"))
    return json.loads(newest.read_text())


@pytest.fixture(scope="module")
def speed():
    return json.loads((FILES / "wan-all-2026-11-15-h200.json").read_text())


def table(text, head):
    """The cells of the table with this head, row by row."""
    lines = text[text.index(head) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_readme_is_short():
    assert len(README.splitlines()) <= 150


def test_every_file_of_the_index_is_there_and_was_made_by_the_command_beside_it():
    rows = table(RESULTS, "| number | file | command |")
    assert len(rows) > 10
    for number, file, command in rows:
        if file == "predicted, no file":
            assert "bench fit" in command
            continue
        assert json.loads((ROOT / file.strip("`")).read_text())["command"] == command.strip("`"), (
            number
        )


def test_the_tables_are_of_the_shipped_weights(quality):
    assert quality["weights"] == weights_hashes(["atrium-world"])
    assert all(row["worlds"] >= 16 for row in quality["rows"])


def test_every_number_of_the_readme_table_was_measured(quality, speed):
    head = "| plan | frames/s | x stock | GB | dB | worst room | identity | worst room |"
    fast = {row["name"]: row for row in speed["rows"]}
    good = {row["asked"]: row for row in quality["rows"]}
    names = ["dense", "window21", "balanced", "fast"]
    rows = table(README, head)
    assert len(rows) == len(names)
    for cells, name in zip(rows, names, strict=True):
        row = good.get("cache=window:budget=21f" if name == "window21" else name)
        fps = fast[name]["rates"]["1880"]["fps"]
        assert cells[1:4] == [
            f"{fps:.1f}", f"{fps / fast['stock']['rates']['1880']['fps']:.2f}x",
            f"{fast[name]['peak_gb']:.1f}",
        ]  # fmt: skip
        # a plan that the file lacks was not measured
        assert cells[4:] == ([NONE] * 4 if row is None else [
            f"{row['revisit_db']:.1f}", f"{row['revisit_db_worst']:.1f}",
            f"{row['identity']:.0%}", f"{row['identity_worst']:.0%}",
        ])  # fmt: skip
        assert ("window of 21" if name == "window21" else f"`{name}`") in cells[0]


def test_every_number_of_the_quality_table_was_measured(quality):
    head = "| plan | revisit, dB | worst room | frames 49-96, dB | identity | worst room |"
    rows = {row["asked"]: row for row in quality["rows"]}
    for cells, plan in zip(table(RESULTS, head), plan_table("readme")[:7], strict=True):
        name = plan.split(":")[-1] if ":" in plan else plan
        assert re.sub("budget=(..)f", r"\1", name) in cells[0]
        if (row := rows.get(plan)) is None:
            assert cells[1:] == [NONE] * 7
            continue

        def spread(key, row=row):
            return f"{row[key]:.1f} ({row[f'{key}_low']:.1f} to {row[f'{key}_high']:.1f})"

        assert cells[1:] == [
            spread("revisit_db"), f"{row['revisit_db_worst']:.1f}", spread("psnr_truth_96"),
            f"{row['identity']:.0%}", f"{row['identity_worst']:.0%}", f"{row['cache_mb']:.0f}",
            f"{row['work_dense']:.0%}",
        ]  # fmt: skip


def read_rows(file):
    document = json.loads((FILES / file).read_text())
    assert document["weights"] == weights_hashes(["atrium-world"])
    return document["rows"]


def test_what_banks_and_rivals_remember_was_measured():
    page = (ROOT / "docs" / "rivals.md").read_text()
    head = "| | plan | revisit, dB | worst room | new places, dB | identity | at end |"
    rows = {row["asked"]: row for row in read_rows("atrium-rivals-2026-11-16-h200.json")}
    rows["dense"] = read_rows("atrium-world-208-2026-11-16-h200.json")[0]
    cells = table(page, head)
    assert {plan.strip("`") for _, plan, *_ in cells} == rows.keys()
    for _, plan, revisit, worst, new, *shares, mb, _ in cells:
        row = rows[plan.strip("`")]
        spread = [row[f"revisit_db{x}"] for x in ("", "_low", "_high")]
        assert revisit == "{:.1f} ({:.1f} to {:.1f})".format(*spread)
        keys = "revisit_db_worst", "new_place_db", "cache_mb"
        assert [worst, new, mb] == [f"{row[key]:.1f}" for key in keys]
        assert shares == [f"{100 * row[key]:.0f} %" for key in ("identity", "identity_last")]
    page = (ROOT / "docs" / "bank.md").read_text()
    rows = read_rows("atrium-world-memory-2026-11-16-h200.json")
    cells = table(page, "| plan (`lossless` and) | revisit, dB | worst room |")
    for (plan, revisit, worst, *_), row in zip(cells, rows, strict=True):
        assert row["asked"].endswith(plan.strip("`"))
        assert [revisit, worst] == [f"{row[f'revisit_db{x}']:.1f}" for x in ("", "_worst")]


def test_a_document_names_the_weights_of_shipped_models_alone():
    record = json.loads(RECORD.read_text())
    found = document("x", [{"model": "atrium-world"}, {"model": "toy-chunks"}])["weights"]
    assert list(found) == ["atrium-world"] and len(found["atrium-world"]) == 64
    assert "weights" not in document("x", [{"model": "toy-chunks"}])
    assert set(weights_hashes(record)) == set(record)


def measured(path, resume=False, done=(), **settings):
    """Two parts of a measurement; `done` is told those that are really measured."""
    parts = Parts(str(path), settings, resume, "words")
    parts.begin("x", "toy", "f" * 16)

    def measure(left):
        for name in left:
            done.append(name)
            yield {"value": {"a": 1.5, "b": float("nan")}[name]}

    return parts.run(["a", "b"], str, measure)


def test_an_interrupted_measurement_goes_on_with_the_parts_it_has(tmp_path):
    path, done = tmp_path / "x.json", []
    assert next(measured(path, done=done, pace=1.0))["value"] == 1.5  # and then it is killed
    kept = json.loads(path.read_text())
    assert (kept["suite"], kept["unfinished"], kept["command"]) == ("x", True, "words")
    assert kept["rows"] == [{"value": 1.5, "part": "a"}]
    found = list(measured(path, resume=True, done=done, pace=1.0))
    assert done == ["a", "b"], "what was there is not measured again"
    assert [row["value"] for row in found] == [1.5, None]
    assert list(measured(path, resume=True, done=done, pace=1.0)) == found and len(done) == 2
    assert len(list(measured(path, done=done, pace=1.0))) == 2 and len(done) == 4


def test_other_settings_weights_or_machines_are_refused(tmp_path):
    path = tmp_path / "x.json"
    list(measured(path, done=[], pace=1.0))
    for change, line in {
        "settings": "was measured with another pace (0.5, now 1.0): choose another file, or leave",
        "machine": "was measured with another machine (TPU, now",
        "fingerprints": "was measured with other weights of toy (gggggggggggg, now ffffffffffff)",
        "suite": "is no results file of x",
    }.items():
        other = {"settings": {"pace": 0.5}, "machine": {"gpu": "TPU"}, "fingerprints": {"toy": "g" * 16},
                 "suite": "y"}[change]  # fmt: skip
        emit(json.loads(path.read_text()) | {change: other}, str(tmp_path / "other.json"))
        with pytest.raises(TachyscopeError, match=re.escape(f"other.json {line}")):
            list(measured(tmp_path / "other.json", resume=True, done=[], pace=1.0))
    emit(document("x", [{"name": "whole"}]), str(path))
    with pytest.raises(
        TachyscopeError, match="is finished: leave `resume` out to measure it again"
    ):
        list(measured(path, resume=True, done=[], pace=1.0))
    with pytest.raises(TachyscopeError, match="`resume` goes on with a file of results, got None"):
        Parts(None, {}, resume=True)
