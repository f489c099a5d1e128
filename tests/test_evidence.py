"""Numbers of ours on docs/evidence.md and docs/tokens.md stand in the files beside them."""

import json
from pathlib import Path

import pytest

from tachyscope.plan import Plan, check_text

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "evidence.md").read_text()
RESULTS = (ROOT / "docs" / "results.md").read_text()
TABLE_1 = "| row | PSNR | density | recall | component | all | ours |"


def table(head, page=PAGE):
    lines = page[page.index(head) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def read(file):
    return json.loads((ROOT / "bench" / "results" / file).read_text())


@pytest.fixture(scope="module")
def files():
    found = {}
    for letter, file, size, command in table("| | file | rooms, frames | command |"):
        document = json.loads((ROOT / file.strip("`")).read_text())
        row = document["rows"][0]
        assert size == f"{row['worlds']}, {row['frames']}"
        if command.startswith("`"):
            assert command.strip("`") == document["command"]
        else:
            assert f"| {file} | `{document['command']}` |" in RESULTS
        found[letter] = {row["plan"]: row for row in document["rows"]}
    return found


def test_table_1_has_every_row_and_the_numbers_of_its_files(files):
    rows = table(TABLE_1)
    # one of 15 is of two variants, and one more is TempCache by budget
    assert len(rows) == 15 + 4
    measured = 0
    for *_, plan, near, pairs, recall, work, file in rows:
        plan = plan.strip("`")
        check_text(plan)
        if not file:
            assert not any((near, pairs, recall, work))
            continue
        row, measured = files[file][str(Plan.parse(plan))], measured + 1
        ours = [f"{row['psnr_dense']:.1f}", f"{row['density']:.1%}", f"{row['work_dense']:.1%}"]
        assert [near, pairs.replace(" %", "%"), work.replace(" %", "%")] == ours, plan
        assert recall.replace(" %", "%") == (f"{row['recall']:.1%}" if "recall" in row else "")
    assert measured == len(rows)


def test_the_sentence_on_quality_is_that_of_the_files(files):
    file_of = {row[6].strip("`"): row[-1] for row in table(TABLE_1)}

    def lost(plan):
        rows = files[file_of[plan]]
        dense, ours = (rows[str(Plan.parse(x))]["revisit_db"] for x in ("dense", plan))
        return f"{dense - ours:.0f}"

    assert f"plan loses {lost('fast-ar')} dB where `fast` loses {lost('fast')}" in PAGE
    assert f"dropping tokens loses {lost('text=ann:hash=lsh')} dB" in PAGE


def test_speeds_are_those_of_the_benchmark():
    rows = {row["name"]: row for row in read("wan-all-2026-11-15-h200.json")["rows"]}
    for *_, ours, over, end in table("| row | all | ours | 1,880 frames | at their end |"):
        # what is `live` was called `fast` then
        times = rows[ours.split("`")[1].replace("live", "fast")]["times"]["dense"]["1880"]
        assert [over, end] == [f"{times['fps']:.1f}x", f"{times['fps_end']:.1f}x"]
    now = {row["name"]: row for row in read("wan-plans-2026-11-18-h200.json")["rows"]}
    fps = [x["rates"]["1880"]["fps"] for x in (now["fast"], rows["dense"])]
    assert f"`fast` is {fps[0] / fps[1]:.1f}x as fast" in PAGE


def test_fastcars_rows_are_those_of_the_decode_engine():
    rows = {
        row["name"]: row
        for row in reversed(read("tokens-2026-11-16-h200.json")["rows"])
        if row["weights"] == "bf16" and row["rows"] == 1
    }
    cells = table("| row | PSNR | LPIPS | VBench | latency, s | x | ours | x, trunk | x, step |")
    assert len(cells) == 8
    for *_, paper, ours, trunk, step in cells:
        row = rows[ours.strip("`")]
        assert float(paper) == row["paper"]
        if "trunk_speedup" in row:
            assert [trunk, step] == [f"{row['trunk_speedup']:.2f}", f"{row['step_speedup']:.2f}"]


# rows of docs/tokens.md by how they begin, and its runs
TOKEN_ROWS = {
    "dense": "dense", "window 256": "window256", "window 16": "window16", "20 %": "replay20",
    "50 %": "replay50", "80 %": "replay80", "all after": "all", "all, window 256": "all-window256",
    "all, window 16": "all-window16", "all by": "input-all", "neurons 50": "neurons50",
    "neurons": "neurons75",
    "prune": "prune75", "slice of half": "neurons50", "every token scored": "scored", "scored": "scored",
}  # fmt: skip
TOKEN_RUNS = {
    "1": "2026-11-16", "2": "slices-2026-11-16", "4": "tuned-2026-11-16", "5": "drafts-2026-11-16",
    "6": "decode-2026-11-16", "7": "neurons-2026-11-18",
}  # fmt: skip


@pytest.mark.parametrize("count", [1, 2])
def test_tokens_by_plan_are_those_of_their_runs(count):
    head = "| bf16, one row | run |" if count == 1 else "| bf16, guidance pair | run |"
    cells, name = table(head, (ROOT / "docs" / "tokens.md").read_text()), ""
    for label, run, *numbers in [[cell.replace("*", "") for cell in row] for row in cells]:
        if label != "the same":
            name = next(value for key, value in TOKEN_ROWS.items() if label.startswith(key))
        rows = read(f"tokens-{TOKEN_RUNS[run]}-h200.json")["rows"]
        row = next(x for x in rows if (x["name"], x["weights"], x["rows"]) == (name, "bf16", count))
        ms, of_copy, video, later, step, step_video, joules, *_ = numbers
        told = [ms, of_copy.split(", ")[-1], video, later, step, step_video]
        names = "ms", "of_copy", "speedup", "speedup_later"
        keys = [f"trunk_{x}" for x in names] + ["step_ms", "step_speedup"]
        want = [f"{row.get(key, 1.0):.2f}" for key in keys]
        if name == "dense":
            want = ["1" if key.startswith(("trunk_sp", "step_sp")) else x
                    for key, x in zip(keys, want, strict=True)]  # fmt: skip
        assert all(a in ("", b) for a, b in zip(told, want, strict=True)), (label, run, told, want)
        if joules:
            assert abs(float(joules.replace(",", "")) - row["joules_video"]) <= 5, (label, run)


def test_int8_rows_are_those_of_their_run():
    rows = read("tokens-2026-11-16-h200.json")["rows"]
    names = ["window256", "window16", "replay20", "replay50", "replay80", "all", "all-window256",
             "all-window16", "neurons50", "neurons75"]  # fmt: skip
    cells = table("| int8, run 1 | dense, ms |", (ROOT / "docs" / "tokens.md").read_text())
    for count, (_, dense, *ours) in enumerate(cells, 1):
        found = {x["name"]: x for x in rows if (x["weights"], x["rows"]) == ("int8", count)}
        assert dense == f"{found['dense']['trunk_ms']:.2f}"
        assert ours == [f"{found[name]['trunk_speedup']:.2f}" for name in names]
    assert len(cells) == 2


def test_what_replay_costs_is_that_of_the_gates():
    rows = read("atrium-tokens-gates-2026-11-16-h200.json")["rows"]
    made = {(row["method"], row["clip"]): row for row in rows if row["measure"] == "made"
            and row["share"] in (0.0, 0.75)}  # fmt: skip
    for name, *cells in table("| | still | forward | walk | reversing |"):
        method = name.split("`")[1]
        clips = ("still", "forward", "walk", "reversing")
        assert cells == [f"{made[method, clip]['psnr_truth']:.1f}" for clip in clips], method


def test_the_plans_without_a_file_can_be_run():
    plan = Plan.parse("fast-ar attention=ann:hash=int8 text=ann:hash=int8")
    assert (plan.attention.hash, plan.text.hash, plan.attention.read) == ("int8", "int8", 0.28)
