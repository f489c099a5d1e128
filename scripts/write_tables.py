"""Write the world model's quality into README, docs/results.md and docs/evidence.md from one file.

    python scripts/write_tables.py bench/results/atrium-world-readme-DATE-h200.json [MORE...]

The first file is made by `python -m tachyscope.evaluation atrium --only world --table readme
--worlds 16 --frames 96 --plans-only`; others have plans of the table that it lacks, under any name.
Plans that none has get a dash; in evidence.md, which has the first file's alone, they keep what
other files have of them. Sentences that hang on the numbers are listed to be looked at.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tachyscope.evaluation.intervals import versus
from tachyscope.evaluation.plan_tables import table
from tachyscope.plan import Plan

ROOT = Path(__file__).parents[1]
Row = Mapping[str, Any]
README_HEAD = "| plan | frames/s | x stock | GB | dB | worst room | identity | worst room |"
QUALITY_HEAD = "| plan | revisit, dB | worst room | frames 49-96, dB | identity | worst room |"
TABLE_1 = "| row | PSNR | density | recall | component | all | ours |"
FILES_HEAD = "| | file | rooms, frames | command |"
NONE = "–"
WINDOW = "cache=window:budget=21f"
# evidence.md's sentences, by the plan whose loss on revisit they tell
LOSSES = {
    "fast-ar": "the paper's own plan loses",
    "fast": "dB where `fast` loses",
    "text=ann:hash=lsh": "dropping tokens loses",
}
SHOWN = (
    "dense",
    WINDOW,
    "balanced",
    "fast",
    "live",
    "lossless cache=dedup:budget=21f,newest=3",
    "lossless attention=ann:k=640",
    "lossless attention=ann:k=1280",
    "lossless attention=ann:k=640,tile=64,block=1",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    args = parser.parse_args()
    documents = [json.loads(file.read_text()) for file in args.files]
    own = {row["asked"]: row for row in documents[0]["rows"]}
    rows = known_as(SHOWN, [row for each in documents for row in each["rows"]])
    name = f"bench/results/{args.files[0].name}"
    change("README.md", lambda text: readme(text, rows))
    change("docs/results.md", lambda text: results(text, rows, name, documents[0]["command"]))
    change("docs/evidence.md", lambda text: evidence(text, own, name))
    dense = rows["dense"]
    for plan in (plan for plan in SHOWN[1:] if plan in rows):
        pairs = zip(*(x["by_world"]["revisit_db"] for x in (dense, rows[plan])), strict=True)
        print(f"{plan}: loses {lost(rows, plan):.1f} dB on revisit, in one room {most(pairs):.1f}")
    mean, low, high = versus(rows["balanced"], rows[WINDOW], "revisit_db")
    print(f"balanced over the window: {mean:.1f} dB ({low:.1f} to {high:.1f})")


def known_as(plans: Sequence[str], rows: Sequence[Row]) -> dict[str, Row]:
    """Of the rows that have one of these plans, under any name, the first by its plan."""
    found: dict[str, Row] = {}
    for row in rows:
        for plan in plans:
            if str(Plan.parse(plan)) == row["plan"]:
                found.setdefault(plan, row)
    return found


def complete(rows: Mapping[str, Row]) -> bool:
    return set(table("readme")) <= rows.keys()


def change(path: str, rewrite: Callable[[str], str]) -> None:
    (ROOT / path).write_text(rewrite((ROOT / path).read_text()))


def lost(rows: Mapping[str, Row], plan: str) -> float:
    return float(rows["dense"]["revisit_db"] - rows[plan]["revisit_db"])


def most(pairs: Any) -> float:
    return float(max(a - b for a, b in pairs if a is not None and b is not None))


def fill(text: str, head: str, cells_of: Callable[[int, list[str]], list[str]]) -> str:
    """The table with this head, each row's cells as `cells_of` has them."""
    start = text.index(head)
    old = text[start:].split("\n\n")[0]
    lines = old.splitlines()
    for i, line in enumerate(lines[2:]):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        lines[i + 2] = f"| {' | '.join(cells_of(i, cells))} |".replace("|  |", "| |")
        lines[i + 2] = lines[i + 2].replace("|  |", "| |")
    return text[:start] + "\n".join(lines) + text[start + len(old) :]


def readme(text: str, rows: Mapping[str, Row]) -> str:
    def cells_of(i: int, cells: list[str]) -> list[str]:
        row = rows.get(SHOWN[i])
        if row is None:
            return [*cells[:4], *[NONE] * 4]
        return [
            *cells[:4], f"{row['revisit_db']:.1f}", f"{row['revisit_db_worst']:.1f}",
            f"{row['identity']:.0%}", f"{row['identity_worst']:.0%}",
        ]  # fmt: skip

    return fill(text, README_HEAD, cells_of)


def results(text: str, rows: Mapping[str, Row], name: str, command: str) -> str:
    def cells_of(i: int, cells: list[str]) -> list[str]:
        row = rows.get(SHOWN[i])
        if row is None:
            return [cells[0], *[NONE] * 7]

        def spread(key: str) -> str:
            return f"{row[key]:.1f} ({row[f'{key}_low']:.1f} to {row[f'{key}_high']:.1f})"

        return [
            cells[0], spread("revisit_db"), f"{row['revisit_db_worst']:.1f}",
            spread("psnr_truth_96"), f"{row['identity']:.0%}", f"{row['identity_worst']:.0%}",
            f"{row['cache_mb']:.0f}", f"{row['work_dense']:.0%}",
        ]  # fmt: skip

    title = "| README: dB, identity, worst room |"
    index = f"{title} `{name}` | `{command}` |"
    before = re.search(rf"{re.escape(title)}.*", text)
    if before and not complete(rows) and name not in before[0]:  # what is not measured anew
        index += "\n" + before[0].replace(title, "| the same on the first weights |")
    text = re.sub(rf"{re.escape(title)}.*", lambda _: index, text)
    return fill(text, QUALITY_HEAD, cells_of)


def evidence(text: str, rows: Mapping[str, Row], name: str) -> str:
    def cells_of(_: int, cells: list[str]) -> list[str]:
        plan = cells[6].strip("`")
        row = rows.get(plan)
        if row is None:
            # R is this file now
            return cells if cells[-1] != "R" else [*cells[:7], "", "", "", "", ""]
        recall = f"{row['recall']:.1%}" if row.get("recall") is not None else ""
        ours = [f"{row['psnr_dense']:.1f}", f"{row['density']:.1%}", recall]
        ours.append(f"{row['work_dense']:.1%}")
        return [*cells[:7], *(cell.replace("%", " %") for cell in ours), "R"]

    # thresholds that leave out a pass hang on the weights
    for rule in ("teacache", "flowcache"):
        ours = next(plan for plan in table("readme") if plan.startswith(f"passes={rule}"))
        text = re.sub(rf"passes={rule}:threshold=[\d.]+", ours, text)
    text = fill(text, TABLE_1, cells_of)
    first = rows["dense"]
    listed = (
        f"| R | `{name}` | {first['worlds']}, {first['frames']} | in [results.md](results.md) |"
    )
    start = text.index(FILES_HEAD)
    old = text[start:].split("\n\n")[0]
    used = {line.strip("| ").split("|")[-1].strip() for line in table_lines(text, TABLE_1)}
    head, others = old.splitlines()[:2], old.splitlines()[2:]
    others = [line for line in others if line[2] != "R" and line[2] in used]
    text = text[:start] + "\n".join([*head, listed, *others]) + text[start + len(old) :]
    for plan, sentence in LOSSES.items():
        if plan in rows:
            text = re.sub(rf"({sentence}) -?\d+", rf"\g<1> {lost(rows, plan):.0f}", text)
    return text


def table_lines(text: str, head: str) -> list[str]:
    return text[text.index(head) :].split("\n\n")[0].splitlines()[2:]


if __name__ == "__main__":
    main()
