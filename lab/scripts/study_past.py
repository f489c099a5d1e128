"""Plans of a study in regimes, beside dense, by processes that share a device.

    python lab/scripts/study_past.py --out DIR [--groups named,poses] [--device cuda] [--jobs 8]

Every row is appended to DIR/rows.jsonl when it is done, and is not measured again; `--minutes` ends
the study between two rows. DIR/regimes.json is the results document of all that is there.
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
from tachyscope.io.results import document, emit
from tachyscope.models.registry import load
from tachyscope.models.wan.model import WanModel
from tachyscope_lab.evaluation import frame_weights as frame_weights  # registers its policy
from tachyscope_lab.evaluation.regimes import REGIMES, lines, play_regime, row_of, scenes_of
from tachyscope_lab.evaluation.scenes import Scene
from tachyscope_lab.evaluation.world import measured_dtype
from tachyscope_lab.processes import spread_safely
from tachyscope_lab.rivals import frames as frames

BANK, TRIED = "cache=bank:host=int8,resident=", "cache=keep_all text=pads attention=frames:"
ALL, MOST = ("half", "long", "short", "slow", "walk", "far"), ("half", "long", "short", "slow")
# plans by group, and in which regimes
GROUPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "named": (ALL, ("balanced", "fast", "live", "pose")),
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


class Task(NamedTuple):
    regime: str
    plan: str


@cache
def model_on(device: str) -> WanModel:
    """Eager: a window of minutes is over before the model would be compiled."""
    model = load("atrium-world", device=device, dtype=measured_dtype(device))
    return WanModel.narrow(model, fault="the study is of atrium-world")


@cache
def _scenes(name: str, seed: int, rooms: int, device: torch.device) -> list[Scene]:
    return scenes_of(REGIMES[name], seed, rooms, device)


def measure(device: str, seed: int, rooms: int, task: Task) -> dict[str, Any]:
    model, began = model_on(device), time.monotonic()
    scenes = _scenes(task.regime, seed, rooms, model.device)
    found, cost = play_regime(model, task.regime, task.plan, scenes)
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # another process's plan may need it
    cost.pop("frame_ms", None)  # of a device that had more to do
    kept = {"rooms": [room | cost for room in found], "seconds": time.monotonic() - began}
    return {"regime": task.regime, "plan": task.plan} | kept


def tasks_of(
    groups: list[str], regimes: list[str], done: set[Task], until: float
) -> Iterator[Task]:
    """What is left, regime by regime, dense before all others."""
    wanted = dict.fromkeys(
        Task(name, plan)
        for name in regimes or ALL
        for group in groups
        if name in GROUPS[group][0]
        for plan in ("dense", *GROUPS[group][1])
    )
    for task in wanted:
        if task not in done and time.monotonic() < until:
            yield task


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--regimes", default="", help="these alone, set apart by commas")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--rooms", type=int, default=16)
    parser.add_argument("--seed", type=int, default=777)
    parser.add_argument("--minutes", type=float, default=1e6)
    args = parser.parse_args(argv)
    groups, regimes = args.groups.split(","), [x for x in args.regimes.split(",") if x]
    model = model_on("cpu")
    for plan in (plan for group in groups for plan in GROUPS[group][1]):
        parse_plan(model, plan).check(model.shape())
    args.out.mkdir(parents=True, exist_ok=True)
    rows_file = args.out / "rows.jsonl"
    rows = [json.loads(x) for x in rows_file.read_text().splitlines()] if rows_file.exists() else []
    done, until = {Task(x["regime"], x["plan"]) for x in rows}, 60 * args.minutes + time.monotonic()
    work = partial(measure, args.device, args.seed, args.rooms)
    tasks = tasks_of(groups, regimes, done, until)
    for task, row in spread_safely(work, tasks, args.jobs, torch.set_num_threads, 1):
        if isinstance(row, Exception):
            print(f"{task.regime}, {task.plan}: {row}", flush=True)
            continue
        rows.append(row)
        with rows_file.open("a") as file:
            print(json.dumps(row), file=file)
        print(f"{row['seconds']:.1f} s: {task.regime}, {task.plan}", flush=True)
    rooms = {Task(row["regime"], row["plan"]): row["rooms"] for row in rows}
    found = [
        {"model": model.name} | row_of(*task, rooms[task], rooms[Task(task.regime, "dense")])
        for task in sorted(rooms, key=lambda x: ALL.index(x.regime))
        if Task(task.regime, "dense") in rooms
    ]
    command = shlex.join(["python", "lab/scripts/study_past.py", *argv])
    results = document(
        "world-regimes", found, command, seed=args.seed, worlds=args.rooms,
        fingerprint=model.fingerprint, dtype=measured_dtype(args.device),
    )  # fmt: skip
    emit(results, str(args.out / "regimes.json"))
    print(*lines(results), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
