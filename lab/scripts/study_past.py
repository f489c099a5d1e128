"""Plans of a study in regimes, beside dense, by processes that share a device.

    python lab/scripts/study_past.py --out DIR [--groups named,poses] [--device cuda] [--jobs 8]
    python lab/scripts/study_past.py --out DIR --groups named --precisions native,fp8 --device cuda

Every row is appended to DIR/rows.jsonl when it is done, and is not measured again; `--minutes` ends
the study between two rows. DIR/regimes.json is the results document of all that is there. In a
precision beside the model's own, CODED plans are played; each of their rooms is also compared with
the same plan's in the model's own precision, with the same noise.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tachyscope.core.arguments import parse_plan
from tachyscope.io.results import Document, document, emit
from tachyscope.models.registry import in_precision, load
from tachyscope.models.wan.model import WanModel
from tachyscope_lab.evaluation import frame_weights as frame_weights  # registers its policy
from tachyscope_lab.evaluation.intervals import interval
from tachyscope_lab.evaluation.regimes import REGIMES, lines, play_regime, row_of, scenes_of
from tachyscope_lab.evaluation.scenes import Scene
from tachyscope_lab.evaluation.world import measured_dtype
from tachyscope_lab.processes import spread_safely
from tachyscope_lab.rivals import frames as frames

BANK, TRIED = "cache=bank:host=int8,resident=", "cache=keep_all text=pads attention=frames:"
ALL, MOST = ("half", "long", "short", "slow", "walk", "far"), ("half", "long", "short", "slow")
# plans by group, and in which regimes
GROUPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "named": (ALL, ("pose", "fast", "balanced", "live", "similar")),
    "poses": (MOST, (
        f"{BANK}13f attention=pose:past_weight=4 text=pads",
        f"{BANK}23f attention=pose:past_weight=4 text=pads",
        f"{BANK}23f attention=pose:past_weight=8 text=pads",
        f"{BANK}23f attention=pose:past_weight=8,angle=10,distance=0.08 text=pads",
        f"{BANK}22f attention=pose:past_weight=8,newest=3 text=pads",
        f"{TRIED}count=20,begin=1,mask=1",
        f"{TRIED}count=20,begin=1,mask=3",
        f"{TRIED}count=999,begin=1,mask=1",
        f"{TRIED}count=20,gate=2",
        f"{TRIED}count=20,begin=2",
        f"{TRIED}count=20,weight=8,floor=2,newest=3",
        f"{TRIED}by=slip,count=20",
    )),
    "proxies": (MOST, (
        f"{TRIED}by=values,count=16,newest=3",
        f"{TRIED}by=keys,count=16,newest=3",
        f"{TRIED}by=random,count=16,floor=4,weight=4,newest=3",
        f"{TRIED}by=values,count=16,floor=4,weight=4,newest=3",
        f"{TRIED}by=keys,count=16,floor=4,weight=4,newest=3",
        f"{TRIED}by=pose,count=16,floor=4,weight=4,newest=3",
        f"{TRIED}by=oldest,count=16,floor=4,weight=4,newest=3",
        f"{TRIED}by=values,count=16,floor=2,weight=8,newest=3",
        f"{TRIED}by=values,count=36,floor=4,weight=4,newest=3",
    )),
    "tiles": (MOST, tuple(
        f"lossless attention=ann:{x},order=time,newest=3"
        for x in (
            "k=1280,past_weight=2", "k=1280,past_weight=4", "k=1280,past_weight=6",
            "k=1280,past_weight=4,block=1", "k=1280,past_weight=4,block=16",
            "k=1280,past_weight=4,block=64", "k=1920,past_weight=4",
        )
    )),
    "bounded": (MOST, (
        "lossless attention=dense:past_weight=4",
        f"{BANK}42f attention=ann:read=0.5,past_weight=4,order=time,newest=3 text=pads",
        f"{BANK}42f attention=ann:read=1,past_weight=4,order=time,newest=3 text=pads",
        f"{BANK}42f attention=ann:read=0.75,past_weight=4,order=time,newest=3 text=pads",
        f"{BANK}42f attention=ann:read=0.5,past_weight=4,order=time,newest=3,block=16 text=pads",
        f"{BANK}64f attention=ann:k=1280,past_weight=4,order=time,newest=3 text=pads",
        "cache=dedup:budget=42f,newest=3 store=int8 "
        "attention=ann:read=0.5,past_weight=4,order=time text=pads",
        "cache=dedup:budget=42f,newest=3 attention=dense:past_weight=4 text=pads",
        "cache=frames:budget=21f,newest=3 attention=dense:past_weight=4 text=pads",
        "cache=frames:budget=42f,newest=3 attention=dense:past_weight=4 text=pads",
    )),
    "similar": (ALL, (
        *(
            f"{BANK}{frames}f attention=similar{setting} text=pads"
            for frames, setting in (
                (21, ""), (21, ":past_weight=1"), (21, ":past_weight=2"), (21, ":past_weight=8"),
                (13, ""), (13, ":newest=1"), (31, ""),
            )
        ),
        "cache=bank:resident=42f attention=ann:read=0.5,past_weight=4,order=time store=fp8 "
        "text=pads",
    )),
    "unposed": (ALL, tuple(f"{BANK}{n}f attention=similar text=pads" for n in (21, 13))),
    # banks that are full before the video ends, beside those that hold all of it
    "budgets": (("half", "slow", "far"), (
        f"fast {BANK}21f,budget=60f", "fast", f"balanced {BANK}42f,budget=60f", "balanced",
        f"{BANK}13f,budget=60f attention=pose text=pads", "pose",
    )),
    "stores": (("short", "long"), tuple(
        f"cache=keep_all store={x} text=pads" for x in ("int8", "fp8", "int4", "int2")
    )),
}  # fmt: skip


NATIVE = "native"  # the precision that the device's models have
PRECISIONS = (NATIVE, "float32", "fp8", "fp8_linears", "fp8_attention")
CODED = ("dense", "fast", "pose")


class Task(NamedTuple):
    regime: str
    plan: str
    precision: str = NATIVE


@cache
def model_on(device: str, precision: str = NATIVE) -> WanModel:
    """Eager: a window of minutes is over before the model would be compiled."""
    dtype = "float32" if precision == "float32" else measured_dtype(device)
    model = load("atrium-world", device=device, dtype=dtype)
    if precision.startswith("fp8"):  # not by `load`: it refuses float8 if that saves no time
        model = in_precision(model, precision)
    return WanModel.narrow(model, fault="the study is of atrium-world")


@cache
def _scenes(name: str, seed: int, rooms: int, device: torch.device) -> list[Scene]:
    return scenes_of(REGIMES[name], seed, rooms, device)


def measure(device: str, seed: int, rooms: int, task: Task) -> dict[str, Any]:
    model, began = model_on(device, task.precision), time.monotonic()
    scenes = _scenes(task.regime, seed, rooms, model.device)
    found, cost = play_regime(model, task.regime, task.plan, scenes)
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # another process's plan may need it
    cost.pop("frame_ms", None)  # of a device that had more to do
    kept = {"rooms": [room | cost for room in found], "seconds": time.monotonic() - began}
    return task._asdict() | kept


def tasks_of(
    groups: list[str], regimes: list[str], precisions: list[str], done: set[Task], until: float
) -> Iterator[Task]:
    """What is left, regime by regime, dense before all others."""
    wanted = dict.fromkeys(
        Task(name, plan, precision)
        for name in regimes or ALL
        for group in groups
        if name in GROUPS[group][0]
        for precision in precisions
        for plan in ("dense", *GROUPS[group][1])
        if precision == NATIVE or plan in CODED
    )
    for task in wanted:
        if task not in done and time.monotonic() < until:
            yield task


def rows_of(rooms: dict[Task, list[dict[str, Any]]]) -> Iterator[Document]:
    """A row a task, regime by regime: beside dense, and beside the model's own precision."""
    for task in sorted(rooms, key=lambda x: ALL.index(x.regime)):
        dense = rooms.get(Task(task.regime, "dense", task.precision))
        if dense is None:
            continue
        row = row_of(task.regime, task.plan, rooms[task], dense)
        native = rooms.get(Task(task.regime, task.plan))
        if task.precision != NATIVE:
            row["precision"] = task.precision
            if native is not None:
                pairs = zip(rooms[task], native, strict=True)
                apart = [float(ours["db"]) - float(theirs["db"]) for ours, theirs in pairs]
                low_high = interval(apart)
                row["to_native_db"], row["to_native_low"], row["to_native_high"] = low_high
                row["to_native_worst_db"] = min(apart)
        yield row


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--regimes", default="", help="these alone, separated by commas")
    parser.add_argument("--precisions", default=NATIVE, help=f"of {', '.join(PRECISIONS)}")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--rooms", type=int, default=16)
    parser.add_argument("--seed", type=int, default=777)
    parser.add_argument("--minutes", type=float, default=1e6)
    args = parser.parse_args(argv)
    groups, regimes, precisions = (
        [x for x in text.split(",") if x] for text in (args.groups, args.regimes, args.precisions)
    )
    for names, known in ((groups, GROUPS), (regimes, ALL), (precisions, PRECISIONS)):
        for name in names:
            if name not in known:
                parser.error(f"no {name!r}; there are: {', '.join(known)}")
    model = model_on("cpu")
    for plan in (plan for group in groups for plan in GROUPS[group][1]):
        parse_plan(model, plan).check(model.shape())
    args.out.mkdir(parents=True, exist_ok=True)
    rows_file = args.out / "rows.jsonl"
    kept = [json.loads(x) for x in rows_file.read_text().splitlines()] if rows_file.exists() else []
    rooms = {Task(*(row[key] for key in Task._fields)): row["rooms"] for row in kept}
    until = 60 * args.minutes + time.monotonic()
    work = partial(measure, args.device, args.seed, args.rooms)
    tasks = tasks_of(groups, regimes, precisions, set(rooms), until)
    command = shlex.join(["python", "lab/scripts/study_past.py", *argv])

    def results() -> Document:
        """All that is there, written down."""
        found = [{"model": model.name} | row for row in rows_of(rooms)]
        made = document(
            "world-regimes", found, command, seed=args.seed, worlds=args.rooms,
            fingerprint=model.fingerprint, dtype=measured_dtype(args.device),
        )  # fmt: skip
        emit(made, str(args.out / "regimes.json"))
        return made

    for task, row in spread_safely(work, tasks, args.jobs, torch.set_num_threads, 1):
        if isinstance(row, Exception):
            print(f"{', '.join(task)}: {row}", flush=True)
            continue
        rooms[task] = row["rooms"]
        with rows_file.open("a") as file:
            print(json.dumps(row), file=file)
        results()  # the study may be ended
        print(f"{row['seconds']:.1f} s: {', '.join(task)}", flush=True)
    made = results()
    print(*lines(made), sep="\n")
    for row in made["rows"]:
        if "to_native_db" in row:
            print(
                f"{row['regime']}, {row['plan']}, {row['precision']} beside native: "
                f"{row['to_native_db']:+.2f} dB ({row['to_native_low']:+.2f} to "
                f"{row['to_native_high']:+.2f}), worst room {row['to_native_worst_db']:+.2f}"
            )


if __name__ == "__main__":
    main(sys.argv[1:])
