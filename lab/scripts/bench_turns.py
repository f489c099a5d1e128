"""Runs of `tachyscope-lab bench wan` or `bench tokens` beside each other, a chunk of each in turn.

    python lab/scripts/bench_turns.py --out turns.json --run 'bf16=wan --rows stock;fast' \\
        --run 'fp8=wan --rows stock;fast --dtype fp8'
    python lab/scripts/bench_turns.py --out trees.json --tree old=FOLDER \\
        --run 'old=wan --rows fast' --run 'new=wan --rows fast'

Every run is a process with a model of its own, and `--tree` gives it another checkout's folder: the
one that holds `tachyscope`. They load and compile at the same time. From a row's set-up to its last
chunk one process alone uses the device and hands it on after every chunk (every part of a token's
step), so that whatever slows the machine meets all runs alike. Rows are compared by their order:
`over_first` is how many times as fast as the first run's a row is, the median over chunks that
followed each other. `aa` is a run beside itself.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Document = dict[str, Any]
# of each benchmark: the function that measures a row, the one that is timed, and what of a row is
# compared: its takes, and the keys to them
BENCHES = {"wan": ("_measure", "repeat_chunk"), "tokens": ("_time", "milliseconds")}


class Turn:
    """A run's turn on the device: taken at a row's begin, handed on after every timed call."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.held = pipe, False

    def take(self) -> None:
        if not self.held:
            self.pipe.recv()
            self.held = True

    def hand_on(self) -> None:
        self.pipe.send(None)
        self.held = False
        self.take()


def run_bench(pipe: Connection, package: str, words: Sequence[str]) -> int:
    """What one process does: its tree's own command, whose timed calls wait for their turn."""
    module = importlib.import_module(f"{package}.{words[0]}")
    measure_name, timed_name = BENCHES[words[0]]
    measure, timed = getattr(module, measure_name), getattr(module, timed_name)
    turn = Turn(pipe)

    @wraps(measure)
    def measured(*args: Any) -> Any:
        turn.take()
        row: Document = {}
        try:
            made = measure(*args)
            row = args[0] if made is None else made
            return made
        except Exception as fault:
            row = {"failed": f"{type(fault).__name__}: {fault}"[:500]}
            raise
        finally:
            pipe.send(row)

    @wraps(timed)
    def in_turn(*args: Any) -> Any:
        value = timed(*args)
        turn.hand_on()
        return value

    setattr(module, measure_name, measured)
    setattr(module, timed_name, in_turn)
    if package == "tachyscope.bench":  # the tree of before the laboratory
        main: Callable[[list[str]], int] = importlib.import_module(f"{package}.__main__").main
        return main(list(words))
    main = importlib.import_module("tachyscope_lab.cli.app").main
    return main(["bench", *words])


def takes_of(row: Document) -> dict[str, list[float]]:
    """A row's times in ms, in the order in which they were taken."""
    if "points" in row:
        return {"chunk": row["points"][-1]["chunk_ms_all"]}
    taken = {name: row.get(f"{name}_takes_ms", []) for name in ("trunk", "step")}
    return {name: [ms for one in takes for ms in one] for name, takes in taken.items() if takes}


def compared(rows: dict[str, list[Document]]) -> list[Document]:
    """All runs' rows in the order in which they were measured, each beside the first run's."""
    (first, *_), out = list(rows), list[Document]()
    for number in range(max(map(len, rows.values()))):
        for name, of_run in rows.items():
            if number >= len(of_run):
                continue
            row = {"run": name, **of_run[number]}
            if name != first and number < len(rows[first]):
                theirs = takes_of(rows[first][number])
                row["over_first"] = {
                    part: statistics.median(a / b for a, b in zip(theirs[part], ms, strict=False))
                    for part, ms in takes_of(row).items()
                    if theirs.get(part)
                }
            out.append(row)
    return out


def line_of(row: Document) -> str:
    if "failed" in row:
        return f"{row['run']}: {row['failed']}"
    times = ", ".join(f"{k} {statistics.median(ms):.2f} ms" for k, ms in takes_of(row).items())
    faster = ", ".join(f"{k} {x:.3f} times" for k, x in row.get("over_first", {}).items())
    peak = f", peak {row['peak_gb']:.2f} GB" if "peak_gb" in row else ""
    return f"{row['run']}: {row['plan']}: {times}{faster and f' ({faster})'}{peak}"


def start(name: str, words: list[str], tree: Path | None) -> tuple[subprocess.Popen[bytes], Any]:
    ours, theirs = Pipe()
    if tree is None:
        path, package = [ROOT, ROOT / "lab"], "tachyscope_lab.bench"
    else:
        path, package = [tree], "tachyscope.bench"
        if (tree / "lab/tachyscope_lab").is_dir():
            path, package = [tree, tree / "lab"], "tachyscope_lab.bench"
    found = os.pathsep.join([*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, __file__, "--turns-of", f"{theirs.fileno()} {package}", *words],
        env=os.environ | {"PYTHONPATH": found}, pass_fds=[theirs.fileno()],
        stdout=sys.stderr,
    )  # fmt: skip
    theirs.close()
    return process, ours


def take_turns(pipes: dict[str, Connection], on_row: Callable[[str, Document], None]) -> None:
    """Give each run its turn until all have ended."""
    while pipes:
        for name, pipe in list(pipes.items()):
            try:
                pipe.send(None)
                while (row := pipe.recv()) is not None:
                    on_row(name, row)
            except (EOFError, OSError):  # it has ended
                del pipes[name]


def main(argv: list[str]) -> int:
    if argv[:1] == ["--turns-of"]:
        number, package = argv[1].split()
        # this file's folder is no place for a tree's modules to be found in
        sys.path = [path for path in sys.path if path != str(Path(__file__).parent)]
        return run_bench(Connection(int(number)), package, argv[2:])
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", required=True, help="a JSON file of all rows")
    parser.add_argument("--run", action="append", required=True, help="NAME=wan|tokens OPTIONS")
    parser.add_argument("--tree", action="append", default=[], help="NAME=FOLDER, of a run")
    args = parser.parse_args(argv)
    trees = {name: Path(folder) for name, folder in (x.split("=", 1) for x in args.tree)}
    runs = {name: shlex.split(words) for name, words in (x.split("=", 1) for x in args.run)}
    for name, words in runs.items():
        if words[:1] not in ([bench] for bench in BENCHES):
            parser.error(f"run {name!r} is of {' or '.join(BENCHES)}, got {' '.join(words[:1])!r}")
    for name, folder in trees.items():
        if name not in runs or not (folder / "tachyscope").is_dir():
            parser.error(f"--tree {name}={folder}: no run of that name, or no tachyscope in it")
    from tachyscope.io.results import check_json, document, emit

    check_json(args.out)
    command = shlex.join(["python", "lab/scripts/bench_turns.py", *argv])
    rows: dict[str, list[Document]] = {name: [] for name in runs}

    def keep(name: str, row: Document) -> None:
        rows[name].append(row)
        print(line_of({"run": name} | row), flush=True)
        emit(document("bench-turns", compared(rows), command), args.out)  # should time run out

    started = {name: start(name, words, trees.get(name)) for name, words in runs.items()}
    try:
        take_turns({name: pipe for name, (_, pipe) in started.items()}, keep)
        codes = [process.wait() for process, _ in started.values()]
    finally:
        for process, _ in started.values():
            with suppress(ProcessLookupError):
                process.terminate()
    for row in compared(rows):
        if "over_first" in row or "failed" in row:
            print(line_of(row))
    return int(any(codes) or not all(rows.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
