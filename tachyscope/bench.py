"""What a plan saves: work counted by the meter, and time that must first beat its own noise.

`python -m tachyscope.bench cpu` needs neither cyclopts, rich nor av.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch

from tachyscope.adapters import Adapter
from tachyscope.errors import TachyscopeError
from tachyscope.files import check_folder, write_atomically
from tachyscope.machine import machine, versions
from tachyscope.meter import summary
from tachyscope.models import load
from tachyscope.plan import NAMES, Plan, spell
from tachyscope.rollout import open_session, parse_plan, rollout
from tachyscope.session import Session
from tachyscope.types import Chunk

Document = dict[str, Any]

# of the clock alone: one run's is not the rollout's that a benchmark's row stands for
CLOCKS = ("chunk_ms", "fps_avg", "fps_now")
WARM_CHUNKS = 2  # the first has no past, so a policy may do its first work in the second
SAVED = 0.01  # a method that saves less has not paid for its name


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
    """A ratio's median and range, and whether all of it lies outside the noise on one side."""
    low, high = min(ratios), max(ratios)
    return {
        "ratio_dense": statistics.median(ratios),
        "ratio_dense_low": low,
        "ratio_dense_high": high,
        "real": low > aa[1] or high < aa[0],
    }


def label(plan: Plan | str) -> str:
    """A short name for a plan: its own, or `plan`."""
    return plan if isinstance(plan, str) and plan in NAMES else "plan"


def size_of(chunk: Chunk) -> str:
    """A chunk's height and width in pixels, as `--size` takes them."""
    return "{}x{}".format(*chunk.frames.shape[1:3])


def notes(session: Session, rows: Sequence[Mapping[str, float]]) -> list[str]:
    """What a reader must know of a finished rollout: every method that saved under 1 %."""
    plan, sums = session.plan, summary(rows)
    found = []
    name, kept = _name(plan.cache), session.past / max(session.seen, 1)
    if session.past == session.seen and not plan.cache.grows:
        found.append(f"cache policy {name!r} saved nothing: the video is shorter than its budget")
    elif name != "keep_all" and kept > 1 - SAVED:
        found.append(_under("cache", name, f"it kept {kept:.1%} of the entries"))
    name, read = _name(plan.attention), sums.get("pairs", 0.0) / _pairs_held(session, rows)
    if sums.get("simulated_pairs_skipped"):
        found.append(_simulated("attention", name, sums["simulated_pairs_skipped"], "pairs"))
    elif name != "dense" and read > 1 - SAVED:
        found.append(_under("attention", name, f"it read {read:.1%} of what the cache held"))
    name, read = _name(plan.text), sums.get("text_density", 0.0)
    if name not in ("none", "dense") and read > 1 - SAVED:
        found.append(_under("text", name, f"it read {read:.1%} of the prompt's tokens"))
    name, share = _name(plan.replay), sums["share_all"]
    if sums.get("simulated_rows_replayed"):
        found.append(_simulated("replay", name, sums["simulated_rows_replayed"], "MLP rows"))
    elif name != "none" and share < SAVED:
        found.append(_under("replay", name, f"it replayed {share:.1%} of the MLP rows"))
    return found


def _name(policy: Any) -> str:
    return spell(policy).partition(":")[0]


def _under(part: str, name: str, why: str) -> str:
    return f"{part} policy {name!r} saved under 1 %: {why}"


def _simulated(part: str, name: str, count: float, what: str) -> str:
    return (
        f"{part} policy {name!r} only simulated its saving on this device: "
        f"{count:,.0f} {what} were worked out and then left out"
    )


def _pairs_held(session: Session, rows: Sequence[Mapping[str, float]]) -> float:
    """Pairs that reading everything would have scored over the caches this rollout had."""
    shape, past, pairs = session.shape, session.prompt, 0.0
    for row in rows:
        if shape.causal:
            n = shape.places
            pairs += n * past + n * (n + 1) // 2
        else:
            pairs += shape.passes * shape.chunk_tokens * (past + shape.chunk_tokens)
        past = int(row["entries"])
    return pairs * shape.rows * shape.heads * shape.layers


def document(
    suite: str,
    rows: Sequence[Document],
    command: str = "",
    aa: tuple[float, float] | None = None,
    **more: Any,
) -> Document:
    """A results document: what was measured, when, on what and by which command."""
    head: Document = {
        "schema": 1,
        "suite": suite,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": machine(),
        "versions": versions(),
        "command": command,
    }
    if aa is not None:
        head["aa"] = {"low": aa[0], "high": aa[1]}
    return head | more | {"rows": list(rows)}


def to_json(value: Document, indent: int | None = None) -> str:
    """Strict JSON; a number that JSON has no word for (infinity, not a number) becomes null."""
    separators = (",", ":") if indent is None else None
    return json.dumps(_finite(value), indent=indent, separators=separators, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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


def check_json(where: str | None) -> None:
    """Raise where a document could not be written, before it is measured."""
    if where not in (None, "-"):
        path = Path(where)
        if path.is_dir():
            raise TachyscopeError(f"{path} is a folder: give the name of a file")
        check_folder(path.parent)


def emit(found: Document, where: str | None) -> None:
    """Write a document to a file, or as the last line of stdout for `-`; None is nowhere."""
    if where == "-":
        print(to_json(found))
    elif where is not None:
        write_atomically(where, to_json(found, indent=2) + "\n")


class _Parser(argparse.ArgumentParser):
    """argparse with faults of one line."""

    def error(self, message: str) -> NoReturn:
        raise TachyscopeError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """The verb `bench` without the command line's packages."""
    words = sys.argv[1:] if argv is None else argv
    prog = "python -m tachyscope.bench"
    parser = _Parser(prog=prog, description="Time plans against dense, and dense against itself.")
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
