"""Gate quality of the shipped token model: every method of `evaluation.gates`, a line a task.

    python lab/scripts/eval_gates.py --out out/gates --device cuda --jobs 2

With --plan those plans make frames beside dense, instead of all methods; --method takes some of
the methods.

A row of a batch is a room; on a GPU all kinds of camera share one and a token's step is a CUDA
graph, on a CPU each has its own and the step is native. Methods that rank by another score than
their policy's own run token by token. --out gets gates.jsonl, a line as each task ends (its rows,
or its fault), and at the end gates.json, a results document, and gates.md, its tables. Tasks that
the file already has are not done again, and after --seconds none is begun.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
import traceback
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from tachyscope.io.machine import cores
from tachyscope.io.results import document
from tachyscope.models.registry import load
from tachyscope.models.vila_u.model import VilaModel
from tachyscope.weights import digest
from tachyscope_lab.evaluation.clips import CLIPS, GIVEN, Clip, make_clip
from tachyscope_lab.evaluation.gates import (
    DRAWN,
    METHODS,
    SHARES,
    ClipKey,
    Task,
    clip_keys,
    lines,
    measure,
    plan_tasks,
    tasks,
)
from tachyscope_lab.processes import spread


@cache
def model_on(device: str, calibration: Path | None) -> VilaModel:
    model = VilaModel.narrow(load("atrium-tokens", device=device), "no token model")
    model.calibration = calibration or model.calibration
    if device == "cpu" and model.compiling_pays(GIVEN):
        model.compile()
    return model


def prepare(clips: dict[ClipKey, Clip]) -> None:
    torch.set_num_threads(1)
    DRAWN.update(clips)


def draw_clip(key: ClipKey) -> Clip:
    return make_clip(*key)


def work(device: str, calibration: Path | None, end: float, task: Task) -> dict[str, Any]:
    begun = time.perf_counter()
    if time.time() > end:
        return {"task": asdict(task), "fault": "not begun, for want of time"}
    try:
        values = measure(model_on(device, calibration), task)
        rows = [{"device": device} | row for row in values]
        return {"task": asdict(task), "rows": rows, "seconds": time.perf_counter() - begun}
    except Exception:
        return {"task": asdict(task), "fault": traceback.format_exc()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1e6, help="after which no task is begun")
    parser.add_argument("--worlds", type=int, default=16)
    parser.add_argument("--calibration", type=Path, help="instead of the shipped one")
    parser.add_argument("--clip", action="append", choices=CLIPS)
    parser.add_argument("--share", action="append", type=float)
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--method", action="append", choices=METHODS)
    parser.add_argument("--frames", type=int, default=GIVEN, help="teacher-forced; of plans, made")
    either.add_argument("--plan", action="append", help="makes frames, instead of the methods")
    parser.add_argument("--seed", type=int, default=0, help="of the plans' rooms")
    args = parser.parse_args()
    end = time.time() + args.seconds
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "gates.jsonl"
    written = file.read_text().splitlines() if file.is_file() else []
    results = [one for one in map(json.loads, written) if "rows" in one]
    done = [json.dumps(one["task"]) for one in results]
    clips = args.clip or tuple(CLIPS)
    chosen = tasks(args.worlds, clips, args.share or SHARES, args.frames)
    if args.method:
        some = [(t, tuple(name for name in t.methods if name in args.method)) for t in chosen]
        chosen = [replace(task, methods=names) for task, names in some if names]
    if args.plan:
        chosen = plan_tasks(args.plan, args.worlds, clips, args.seed, args.frames)
    if args.device == "cpu":
        chosen = [replace(task, clips=(clip,)) for task in chosen for clip in task.clips]
    left = [task for task in chosen if json.dumps(asdict(task)) not in done]
    print(f"{len(left)} tasks of {len(chosen)}", flush=True)
    size = load("atrium-tokens").size[0]
    keys = sorted({key for task in left for key in clip_keys(task, size)})
    clips_of = spread(draw_clip, keys, min(len(keys), cores()) or 1, torch.set_num_threads, 1)
    prepare(dict(zip(keys, clips_of, strict=True)))
    print(f"{len(keys)} clips drawn", flush=True)
    with file.open("a") as out:
        one_task = partial(work, args.device, args.calibration, end)
        for one in spread(one_task, left, args.jobs, prepare, DRAWN, in_order=False):
            out.write(json.dumps(one) + "\n")
            out.flush()
            results.append(one)
            print(one["task"], one.get("fault", f"{one.get('seconds', 0):.0f} s"), flush=True)
    rows = [row for one in results for row in one.get("rows", ())]
    command = shlex.join(["python", "lab/scripts/eval_gates.py", *sys.argv[1:]])
    output = document(
        "atrium-tokens-gates", rows, command, model="atrium-tokens",
        clips=CLIPS, given=GIVEN, calibration=args.calibration and digest(args.calibration),
    )  # fmt: skip
    (args.out / "gates.json").write_text(json.dumps(output))
    (args.out / "gates.md").write_text("\n".join(lines(rows)) + "\n")


if __name__ == "__main__":
    main()
