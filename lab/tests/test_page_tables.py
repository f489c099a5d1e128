"""The generator of the pages' tables: what it writes is what results/ has, and pages hold it."""

import json
import re
import shutil

import pytest

from tachyscope.core.errors import TachyscopeError
from tachyscope_lab.cli.app import main as run
from tachyscope_lab.results import RESULTS, Results, add_entry, read_suite, to_text
from tachyscope_lab.tables import TABLES, names_of, pages, write_blocks, write_pages
from tachyscope_lab.tables.markdown import minus, number, percent, signed, table


@pytest.fixture(scope="module")
def results():
    return Results()


@pytest.mark.parametrize("name", TABLES)
def test_every_table_can_be_written_from_results(name, results):
    for block in TABLES[name](results).split("\n\n"):
        lines = [line for line in block.splitlines() if line.startswith("|")]
        assert len(lines) != 1 and "nan" not in block and "None" not in block


def test_pages_hold_what_results_have(results):
    assert not [path.name for path in write_pages(results, check=True)], "tachyscope-lab tables"


def test_pages_mark_tables(results):
    assert {"readme-gain", "readme-plans", "readme-tokens"} <= set(names_of(pages()))


def test_a_block_is_replaced_and_the_rest_of_the_page_stays(results):
    page = "before\n<!-- table: serve -->\nold\n<!-- /table -->\nafter\n"
    new = write_blocks(page, results)
    assert new.startswith("before\n<!-- table: serve -->\n| model ") and "old" not in new
    assert new.endswith(" |\n<!-- /table -->\nafter\n")
    assert write_blocks(new, results) == new


def test_unknown_and_open_blocks_are_refused(results):
    with pytest.raises(
        TachyscopeError, match="marks a table 'none': choose one of readme-gain, readme-plans"
    ):
        write_blocks("<!-- table: none -->\n<!-- /table -->", results)
    with pytest.raises(TachyscopeError, match="give every block both"):
        write_blocks("<!-- table: serve -->\n", results)


def test_a_changed_result_fails_the_check_and_changes_the_page(tmp_path):
    shutil.copytree(RESULTS, tmp_path / "results")
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("<!-- table: readme-plans -->\n<!-- /table -->\n")
    results = Results(tmp_path / "results")
    assert [path.name for path in write_pages(results, tmp_path)] == ["README.md"]
    assert not write_pages(results, tmp_path, check=True)
    entry = json.loads(json.dumps(results.entry("wan-chunks", "plans-60")))
    entry["rows"][0]["chunk_ms"] = 975.6  # 12 frames a chunk
    add_entry(tmp_path / "results", "wan-chunks", "plans-60", entry["about"], entry)
    changed = Results(tmp_path / "results")
    assert write_pages(changed, tmp_path, check=True)
    assert (
        write_pages(changed, tmp_path) and "| 12.3 (0.5x) |" in (tmp_path / "README.md").read_text()
    )


def test_a_plan_by_regime_has_interval_and_worst_room_and_no_cell_is_empty(tmp_path):
    shutil.copytree(RESULTS, tmp_path / "results")
    row = {"regime": "far", "plan": "cache=window:budget=21f", "to_dense_db": -2.5,
           "to_dense_low": -4.0, "to_dense_high": -1.0, "worst_room_db": -9.0}  # fmt: skip
    dense = {"regime": "far", "plan": "dense", "db": 20.0}
    document = {"command": "words", "rows": [row, dense]}
    add_entry(tmp_path / "results", "world-regimes", "plans", "one", document)
    lines = TABLES["regimes"](Results(tmp_path / "results")).splitlines()
    # a row with an interval stands before one without
    assert lines[2].startswith("| `dense` |") and lines[2].endswith("| 20.0 dB |")
    assert lines[3] == "| `stock` | – | – | – | – | – | −2.5±1.5 (−9.0) |"
    assert "|  |" not in TABLES["readme-plans"](Results(tmp_path / "results"))


def test_a_speed_of_a_plan_that_had_another_cache_is_not_shown(tmp_path):
    shutil.copytree(RESULTS, tmp_path / "results")
    entry = Results(tmp_path / "results").entry("wan-chunks", "plans")
    (fast,) = (row for row in entry["rows"] if row["name"] == "fast")
    cells = {}
    bank, window = "cache=bank:resident=21f,budget=240f,host=int8", "cache=window:budget=9f"
    for cache in (
        f"{bank} attention=ann:read=0.1",
        f"{bank} attention=pose",
        f"{window} attention=ann:k=9",
    ):
        fast["plan"] = f"{cache} text=dense replay=none"
        add_entry(tmp_path / "results", "wan-chunks", "plans", entry["about"], entry)
        rows = TABLES["readme-plans"](Results(tmp_path / "results")).splitlines()
        cells[cache] = next(row for row in rows if "**`fast`**" in row).split("|")[2:4]
    assert [" GB " in memory for memory, _ in cells.values()] == [True, False, False]
    assert list(cells.values())[1] == [" – ", " – "]


def test_an_entry_is_added_or_replaced_in_its_place(tmp_path):
    rows = [{"name": "a", "ms": 1.5}, {"name": "b", "ms": None}]
    document = {"schema": 1, "suite": "x", "date": "2026-11-18", "command": "words", "rows": rows}
    path = add_entry(tmp_path, "s", "one", "first", document)
    add_entry(tmp_path, "s", "two", "second", document)
    add_entry(tmp_path, "s", "one", "anew", document | {"rows": rows[:1]})
    found = read_suite(path)
    assert [(x["name"], x["about"], len(x["rows"])) for x in found] == [
        ("one", "anew", 1), ("two", "second", 2),
    ]  # fmt: skip
    assert found[1]["command"] == "words" and found[1]["rows"] == rows
    assert '\n    {"name": "a", "ms": 1.5},\n' in path.read_text(), "a row is a line"
    assert json.loads(to_text("s", found)) == json.loads(path.read_text())


def test_a_broken_suite_is_refused_in_one_line(tmp_path):
    (tmp_path / "world.json").write_text('{"suite": "other", "entries": []}')
    with pytest.raises(TachyscopeError, match="world.json is no file of a suite: restore it"):
        read_suite(tmp_path / "world.json")


def test_results_are_at_most_twenty_files_named_by_suite():
    files = sorted(RESULTS.glob("*.json"))
    assert 10 <= len(files) <= 20
    for path in files:
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*\.json", path.name)
        names = [entry["name"] for entry in read_suite(path)]
        assert len(set(names)) == len(names)


def test_the_commands_of_entries_name_no_file_of_the_old_folder(results):
    for suite in results.suites:
        for entry in results.entries(suite).values():
            assert "bench/results" not in entry["command"] and entry["about"]


def test_numbers_are_written_as_the_pages_have_them():
    assert [number(x) for x in (1234.56, -0.04, -0.06, None)] == ["1,234.6", "0.0", "−0.1", ""]
    assert percent(0.915) == "92 %" and minus("-3") == "−3"
    assert [signed(x) for x in (0.31, -0.31, 0.04, -0.04)] == ["+0.3", "−0.3", "0.0", "0.0"]
    assert table(["a", "b"], [["1", ""]]) == "| a | b |\n|---|---|\n| 1 | |"
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        table(["a", "b"], [["1"]])


def test_the_verbs_write_and_show(tmp_path, capsys):
    assert run(["tables", "--show", "serve"]) == 0
    assert capsys.readouterr().out.startswith("| model | clients |")
    assert run(["tables", "--show", "none"]) == 2
    assert "there is no table 'none'" in capsys.readouterr().err
    assert run(["tables", "--check"]) == 0
    assert run(["record", str(tmp_path / "x.json"), "--suite", "world", "--name", "x"]) == 2
    assert "is no results file: give one that --json wrote" in capsys.readouterr().err
