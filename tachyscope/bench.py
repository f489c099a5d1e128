"""What a plan saves: work counted by the meter, and time that must first beat its own noise.

`python -m tachyscope.bench cpu` needs neither cyclopts, rich nor av.
"""

from __future__ import annotations

import argparse
import random
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NoReturn

import torch

from tachyscope.adapters import Adapter
from tachyscope.errors import TachyscopeError
from tachyscope.meter import summary
from tachyscope.models import load
from tachyscope.notes import notes
from tachyscope.plan import NAMES, Plan
from tachyscope.results import Document, check_json, document, emit, size_of
from tachyscope.rollout import open_session, parse_plan, rollout

# of the clock alone: one run's is not the rollout's that a benchmark's row stands for
CLOCKS = ("chunk_ms", "fps_avg", "fps_now")
WARM_CHUNKS = 2  # the first has no past, so a policy may do its first work in the second


def bench(
    model: Adapter,
    plans: Sequence[str] = ("fast", "balanced"),
    *,
    frames: int = 48,
    rounds: int = 5,
    prompt: str = "a red room",
    seed: int = 0,
    command: str = "",
    watch: Callable[[int], None] | None = None,
) -> Document:
    """Time plans against dense, and dense against itself, by turns; a results document.

    `ratio_dense` is the median over rounds of dense / plan. `aa` is the widest ratio, taken both
    ways, that the same clock gave two equal runs; `real` holds where every round's ratio lies
    outside it on one side. `watch` is told how many rounds are done.
    """
    if rounds < 1:
        raise TachyscopeError(f"rounds must be 1 or more, got {rounds}")
    asked: dict[str, Any] = {"frames": frames, "prompt": prompt, "seed": seed}
    turns = [("dense", parse_plan(model, "dense")), ("again", parse_plan(model, "dense"))]
    turns += [(text, parse_plan(model, text)) for text in plans]
    for _, plan in turns:
        # every plan's faults show before the first is timed
        open_session(model, plan, **asked)
    for _, plan in turns:
        warm(model, plan, **asked)
    takes: list[list[Document]] = [[] for _ in turns]
    shuffle = random.Random(seed)
    for done in range(rounds):
        # neighbours share the machine's mood, so the two dense runs may not always be neighbours
        for i in shuffle.sample(range(len(turns)), len(turns)):
            takes[i].append(_timed(model, turns[i][1], asked))
        if watch is not None:
            watch(done + 1)
    times = [[take["chunk_ms"] for take in of_plan] for of_plan in takes]
    aa = noise(times[0], times[1])
    rows = [_row(turns[0], takes[0], model)]
    for turn, of_plan, ms in zip(turns[2:], takes[2:], times[2:], strict=True):
        ratios = [a / b for a, b in zip(times[0], ms, strict=True)]
        rows.append(_row(turn, of_plan, model) | verdict(ratios, aa))
    return document(f"bench-{model.device.type}", rows, command, aa)


def _timed(model: Adapter, plan: Plan, asked: Mapping[str, Any]) -> Document:
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.device)
    session = open_session(model, plan, **asked)
    stats, size = [], ""
    for chunk in rollout(model, session=session, frames=asked["frames"]):
        stats.append(chunk.stats)
        size = size_of(chunk)
    row: Document = {"size": size, **summary(stats), "notes": notes(session, stats)}
    if model.device.type == "cuda":
        row["peak_gb"] = torch.cuda.max_memory_allocated(model.device) / 1e9
    return row


def _row(turn: tuple[str, Plan], takes: Sequence[Document], model: Adapter) -> Document:
    """A plan's counts, which every round repeats, with the median round's time."""
    row = {key: value for key, value in takes[-1].items() if key not in CLOCKS}
    ms = statistics.median(take["chunk_ms"] for take in takes)
    named: Document = {"name": turn[0], "plan": str(turn[1]), "model": model.name}
    return named | row | {"chunk_ms": ms, "fps_avg": 1e3 * row["frames"] / ms}


def warm(model: Adapter, plan: Plan | str, **asked: Any) -> None:
    """Make two chunks for nothing: what a process does once is then done."""
    for _ in islice(rollout(model, plan, **asked), WARM_CHUNKS):
        pass


def noise(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """The widest ratio, taken both ways, between times of equal runs."""
    high = max(max(a, b) / min(a, b) for a, b in zip(first, second, strict=True))
    return 1 / high, high


def verdict(ratios: Sequence[float], aa: tuple[float, float]) -> Document:
    """A ratio's median and range, and whether all of it lies outside the noise on one side.

    Fewer than three ratios show no range, so that they are never real.
    """
    low, high = min(ratios), max(ratios)
    return {
        "ratio_dense": statistics.median(ratios),
        "ratio_dense_low": low,
        "ratio_dense_high": high,
        "real": len(ratios) >= 3 and (low > aa[1] or high < aa[0]),
    }


def label(plan: Plan | str) -> str:
    """A short name for a plan: its own, or `plan`."""
    return plan if isinstance(plan, str) and plan in NAMES else "plan"


def lines(found: Document) -> list[str]:
    """A bench document as a reader wants it: the noise, then time beside counted work."""
    rows, aa = found["rows"], found["aa"]
    cpu, gpu = found["machine"]["cpu"], found["machine"]["gpu"]
    width = max(len(row["name"]) for row in rows)
    out = [
        f"{rows[0]['model']} {rows[0]['size']}, {rows[0]['frames']:.0f} frames, "
        f"torch {found['versions']['torch']}, {gpu or cpu}",
        f"dense against itself: {aa['low']:.2f}x to {aa['high']:.2f}x; a ratio inside is noise",
        f"{'plan':{width}}  frames/s  density  rows computed    GMAC  of dense   ratio",
    ]
    for row in rows:
        work = row["macs"] / rows[0]["macs"]
        line = (
            f"{row['name']:{width}}  {row['fps_avg']:8.1f}  {row['density']:7.1%}  "
            f"{row['rows_computed']:13.0f}  {row['macs'] / 1e9:6.2f}  {work:8.1%}"
        )
        if "ratio_dense" in row:
            line += f"  {row['ratio_dense']:5.2f}x {speed_word(row)}"
        out.append(line)
    return out + [f"{row['name']}: {note}" for row in rows for note in row["notes"]]


def speed_word(row: Mapping[str, Any]) -> str:
    """Whether a row's ratio is a speed-up or a slow-down; no verdict where a round is in noise."""
    if not row["real"]:
        return "no verdict"
    return "faster" if row["ratio_dense"] > 1 else "slower"


def split_plans(text: str) -> list[str]:
    """`fast;balanced`: plans in one word of a command line."""
    found = [plan.strip() for plan in text.split(";") if plan.strip()]
    if not found:
        raise TachyscopeError(
            f"plans are texts set apart by ';', got {text!r}: try 'fast;balanced'"
        )
    return found


class Parser(argparse.ArgumentParser):
    """argparse with faults of one line."""

    def error(self, message: str) -> NoReturn:
        raise TachyscopeError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """The verb `bench` without the command line's packages."""
    words = sys.argv[1:] if argv is None else argv
    prog = "python -m tachyscope.bench"
    parser = Parser(prog=prog, description="Time plans against dense, and dense against itself.")
    parser.add_argument("device", choices=["cpu"])
    parser.add_argument("--model", default="toy-chunks")
    parser.add_argument("--plans", default="fast;balanced", help="set apart by ';'")
    parser.add_argument("--frames", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="a file, or - for the last line of stdout")
    try:
        args = parser.parse_args(words)
        check_json(args.json)
        plans = split_plans(args.plans)
        found = bench(
            load(args.model, device=args.device), plans, frames=args.frames, rounds=args.rounds,
            command=f"{prog} {shlex.join(words)}",
        )  # fmt: skip
        print("\n".join(lines(found)))
        emit(found, args.json)
    except TachyscopeError as error:
        print(f"tachyscope: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
