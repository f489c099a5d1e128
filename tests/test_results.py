"""What README and docs/results.md say was measured, by the command beside it, on the shipped weights."""

import json
import re
from pathlib import Path

import pytest

from tachyscope.errors import TachyscopeError
from tachyscope.evaluation.plan_tables import table as plan_table
from tachyscope.plan import Plan
from tachyscope.results import Parts, document, emit
from tachyscope.weights import RECORD, weights_hashes

ROOT = Path(__file__).parents[1]
README, RESULTS = (ROOT / "README.md").read_text(), (ROOT / "docs" / "results.md").read_text()
FILES = ROOT / "bench" / "results"
PLANS = "atrium-world-plans-2026-11-18-epyc2.json"
QUALITY = ("atrium-world-readme-2026-11-18-h200.json", "atrium-world-banks-2026-11-18-h200.json")


@pytest.fixture(scope="module")
def quality():
    """The rows of both files by the plan that they are of, whatever it was called."""
    return {row["plan"]: row for file in reversed(QUALITY) for row in read_rows(file)}


def read_rows(file):
    document = json.loads((FILES / file).read_text())
    assert document["weights"] == weights_hashes(["atrium-world"])
    return document["rows"]


def speeds(file):
    rows = json.loads((FILES / file).read_text())["rows"]
    return {row["name"]: row for row in rows}


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


def test_the_tables_are_of_at_least_16_rooms(quality):
    assert all(row["worlds"] >= 16 for row in quality.values())


def test_every_number_of_the_readme_table_was_measured():
    head = "| plan | frames/s | x stock | GB | dB | worst room | identity | worst room |"
    names = ["dense", "stock", "balanced", "fast", "live"]
    rows = table(README, head)
    quality = {row["plan"]: row for row in read_rows(PLANS)}
    assert len(rows) == len(names) and all(row["worlds"] >= 16 for row in quality.values())
    for cells, name in zip(rows, names, strict=True):
        row = quality[str(Plan.parse("cache=window:budget=21f" if name == "stock" else name))]
        fast = speeds(
            f"wan-{'all-2026-11-15' if name == 'dense' else 'plans-2026-11-18'}-h200.json"
        )
        fps = fast[name]["rates"]["1880"]["fps"]
        assert cells[1:4] == [
            f"{fps:.1f}", f"{fps / fast['stock']['rates']['1880']['fps']:.2f}x",
            f"{fast[name]['peak_gb']:.1f}",
        ]  # fmt: skip
        assert cells[4:] == [
            f"{row['revisit_db']:.1f}", f"{row['revisit_db_worst']:.1f}",
            f"{row['identity']:.0%}", f"{row['identity_worst']:.0%}",
        ]  # fmt: skip
        assert ("window of 21" if name == "stock" else f"`{name}`") in cells[0]


def test_every_number_of_the_quality_table_was_measured(quality):
    head = "| plan | revisit, dB | worst room | frames 49-96, dB | identity | worst room |"
    for cells, plan in zip(table(RESULTS, head), plan_table("readme")[:9], strict=True):
        name = plan.split(":")[-1].removesuffix(",newest=3") if ":" in plan else plan
        assert re.sub("budget=(..)f", r"\1", name) in cells[0]
        row = quality[str(Plan.parse(plan))]

        def spread(key, row=row):
            return f"{row[key]:.1f} ({row[f'{key}_low']:.1f} to {row[f'{key}_high']:.1f})"

        assert cells[1:] == [
            spread("revisit_db"), f"{row['revisit_db_worst']:.1f}", spread("psnr_truth_96"),
            f"{row['identity']:.0%}", f"{row['identity_worst']:.0%}", f"{row['cache_mb']:.0f}",
            f"{row['work_dense']:.0%}",
        ]  # fmt: skip


def test_what_rivals_remember_was_measured():
    page = (ROOT / "docs" / "rivals.md").read_text()
    page = page[page.index("## All of them in one table") :]
    head = "| | plan | revisit, dB | worst room | new places, dB | identity | at end |"
    rows = read_rows("atrium-rivals-2026-11-18-h200.json")
    groups = [(pace, group) for pace in (1.0, 0.25) for group in ("bytes", "pairs", "published")]
    for (pace, group), part in zip(groups, page.split(head)[1:], strict=True):
        wanted = {x["asked"]: x for x in rows if x["pace"] == pace and group in x["groups"]}
        cells = table(head + part, head)
        assert {plan.strip("`") for _, plan, *_ in cells} == wanted.keys()
        for _, plan, revisit, worst, new, *shares, mb, host in cells:
            row = wanted[plan.strip("`")]
            spread = [row[f"revisit_db{x}"] for x in ("", "_low", "_high")]
            assert revisit == "{:.1f} ({:.1f} to {:.1f})".format(*spread)
            keys = "revisit_db_worst", "new_place_db", "cache_mb"
            assert [worst, new, mb] == [f"{row[key]:.1f}" for key in keys]
            assert shares == [f"{100 * row[key]:.0f} %" for key in ("identity", "identity_last")]
            assert host == (f"{row['host_mb']:.0f}" if "host_mb" in row else "")


def test_what_a_thousand_frames_keep_was_measured():
    page = (ROOT / "docs" / "rivals.md").read_text()
    rows = read_rows("atrium-rivals-long-2026-11-18-h200.json")
    measured = {row["asked"]: row for row in rows}
    cells = table(page, "| | plan | revisit, dB | worst room | band |")
    assert {plan.strip("`") for _, plan, *_ in cells} == measured.keys()
    for _, plan, revisit, worst, band, new, same, end, blurred, frozen, pairs, mb, _ in cells:
        row = measured[plan.strip("`")]
        assert (row["frames"], row["worlds"], row["runs"]) == (1000, 16, 3)
        keys = "revisit_db", "revisit_db_worst", "revisit_db_band", "new_place_db"
        assert [revisit.split()[0], worst, band, new] == [f"{row[key]:.1f}" for key in keys]
        shares = [f"{100 * row[key]:.0f} %" for key in ("identity", "identity_last")]
        assert [same, end[: len(shares[1])]] == shares
        keys = "blurred", "frozen", "density"
        assert [blurred, frozen, pairs] == [f"{100 * row[key]:.1f} %" for key in keys]
        assert mb == f"{row['cache_mb']:.0f}"
        assert row["asked"] == "dense" or row["work_spread"] == 1  # counted work stays flat


def test_what_banks_remember_and_how_fast_they_are_was_measured():
    page = (ROOT / "docs" / "bank.md").read_text()
    rows = read_rows("atrium-world-banks-2026-11-18-h200.json")
    cells = table(page, "| plan (`lossless cache=`) | revisit, dB | worst room |")
    for (plan, revisit, worst, *_), row in zip(cells, rows, strict=True):
        assert row["asked"].endswith(plan.split("`")[1])
        assert [revisit, worst] == [f"{row[f'revisit_db{x}']:.1f}" for x in ("", "_worst")]
    rollouts = [
        json.loads((FILES / f"wan-rollout-{name}-2026-11-18-h200.json").read_text())["rows"][0]
        for name in ("bank-int4", "bank-int8", "traced")
    ]
    said = {cells[0]: cells[2:] for cells in table(page, "| | asked | int4, 4,809 frames")}
    for i, row in enumerate(rollouts):
        warm = f"{12e3 / row['settled_ms']:.1f} ({row['fps']:.1f})"
        assert said["frames/s once warm (with the first chunks' compiling)"][i] == warm
        assert said["ms a chunk"][i].startswith(f"{row['settled_ms']:.1f}")
        assert said["late"][i] == f"{100 * row['late_share']:.1f} %"
        denied = f"{100 * row['denied_share']:.1f} %; {row['fetched_mb']:,.0f} MB"
        assert said["denied; fetched a chunk"][i] == denied
    timed = speeds("wan-plans-2026-11-18-h200.json")
    for name, ms, *_, read, choose, commit, peak in table(page, "| row | ms a chunk after 264"):
        row = timed[name.strip("`")]
        parts = [f"{row['parts_ms'][x]:.1f}" for x in ("read", "choose", "commit")]
        assert [ms, read, choose, commit] == [f"{row['chunk_ms']:.1f}", *parts]
        assert peak == f"{row['peak_gb']:.1f}"


def test_loops_were_measured():
    page = (ROOT / "docs" / "eval.md").read_text()
    rows = read_rows("atrium-loops-2026-11-18-epyc2.json")
    cells = table(page, "| plan | replay | return | rot180 | rot360 | ABA | ABCA | mirror |")
    names = ("replay", "return", "rot180", "rot360", "aba", "abca", "mirror", "loop")
    for (plan, *values), row in zip(cells, rows, strict=True):
        assert plan.strip("`") == row["asked"] and row["worlds"] >= 16
        want = [f"{row[f'{x}_db']:.1f} ({row[f'{x}_db_worst']:.1f})" for x in names]
        want += [f"{100 * row[f'switch_{x}']:.0f} %" for x in ("follows", "stays")]
        assert values == want


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
