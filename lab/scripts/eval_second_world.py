"""The table of plans in the town (tachyscope_lab.worlds), by a model that training wrote.

    python lab/scripts/eval_second_world.py out/town --json second.json

Every plan is played through 16 unseen towns in each regime, beside dense and beside frames that are
each made from the true past. What is measured is in --json's file as it comes: after --seconds no
further plan is begun, and the rows that there are make the table.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from functools import partial
from pathlib import Path

import torch

from tachyscope.io.results import Document, document, emit
from tachyscope_lab.evaluation.world import measured_dtype
from tachyscope_lab.processes import spread
from tachyscope_lab.worlds.evaluate import (
    ENOUGH,
    FORCED,
    REGIMES,
    Task,
    lines,
    measure,
    row_of,
    tasks_of,
)
from tachyscope_lab.worlds.model import load_model

PLANS = (
    "attention=dense:past_weight=4",
    "similar",
    "balanced",
    "fast",
    "cache=window:budget=21f",
    "live",
    "attention=dense:past_weight=8",
    "attention=dense:past_weight=2",
    "attention=ann:k=320,past_weight=4",
    "attention=ann:k=320",
)


def work(
    folder: Path, device: str, dtype: str, seed: int, towns: int, end: float, task: Task
) -> Document | None:
    return None if time.time() > end else measure(folder, device, dtype, seed, towns, task)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", required=True)
    parser.add_argument("--plan", action="append", help="instead of those listed here")
    parser.add_argument("--regime", action="append", choices=REGIMES)
    parser.add_argument("--towns", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e6, help="after which none is begun")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype")
    args = parser.parse_args()
    end, dtype = time.time() + args.seconds, args.dtype or measured_dtype(args.device)
    names = args.regime or list(REGIMES)
    tasks = tasks_of(args.plan or PLANS, names)
    model = load_model(args.folder, "cpu", "float32")
    command = shlex.join(["python", "lab/scripts/eval_second_world.py", *sys.argv[1:]])

    found: dict[Task, Document] = {}
    rows: list[Document] = []

    def write() -> Document:
        rows.sort(key=lambda row: names.index(row["regime"]))
        forced = [row["db"] for row in rows if row["plan"] == FORCED]
        made = document(
            "world-second", rows, command, seed=args.seed, towns=args.towns, dtype=dtype,
            fingerprint=model.fingerprint, enough=min(forced, default=0.0) >= ENOUGH,
        )  # fmt: skip
        emit(made, args.json)
        return made

    one = partial(work, args.folder, args.device, dtype, args.seed, args.towns, end)
    for task, result in zip(
        tasks, spread(one, tasks, args.jobs, torch.set_num_threads, 1), strict=True
    ):
        if result is None:
            continue
        found[task] = result
        dense = found.get(Task(task.regime, "dense"), result)
        row = row_of(model, task, result, dense)
        rows.append(row)
        print(f"{task}: {row.get('db', row.get('to_dense_db')):.2f}", flush=True)
        write()
    print("\n".join(lines(write())))


if __name__ == "__main__":
    main()
