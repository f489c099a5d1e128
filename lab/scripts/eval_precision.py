"""What float8 costs in quality: rooms of Atrium against their truth, in every precision.

    python lab/scripts/eval_precision.py --out precision.json --device cuda --jobs 8

A regime is of `tachyscope-lab eval atrium --regimes`. Each room's distance to the truth in dB,
beside bfloat16's in the same room with the same noise; float32 beside it tells what rounding does
by itself.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from multiprocessing import get_context
from typing import NamedTuple

import torch

from tachyscope.io.results import document, emit
from tachyscope.models.registry import find_device, in_precision, load
from tachyscope_lab.evaluation.regimes import REGIMES, play_regime, scenes_of

BASE = "bfloat16"
PRECISIONS = (BASE, "float32", "fp8_linears", "fp8_attention", "fp8")


class Task(NamedTuple):
    regime: str
    precision: str
    plan: str
    worlds: int
    seed: int
    device: str


def measure(task: Task) -> dict[str, object]:
    """Each room's dB of one regime in one precision."""
    start = time.monotonic()
    torch.set_num_threads(1)
    place = find_device(task.device)
    # on a CPU, whose bfloat16 is slow, float8 rounds numbers of float32
    dtype = BASE if place.type == "cuda" and task.precision != "float32" else "float32"
    precision = task.precision if task.precision.startswith("fp8") else None
    try:
        model = load("atrium-world", device=place, dtype=dtype)
        if precision is not None:  # `load` refuses it on a GPU: so small a model saves no time
            model = in_precision(model, precision)
        scenes = scenes_of(REGIMES[task.regime], task.seed, task.worlds, place)
        rooms, _ = play_regime(model, task.regime, task.plan, scenes)
        result: dict[str, object] = {"db": [room["db"] for room in rooms]}
    except Exception as fault:  # the others go on
        result = {"fault": f"{type(fault).__name__}: {str(fault)[-400:]}"}
    return task._asdict() | result | {"seconds": time.monotonic() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="a JSON file of all rooms")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--worlds", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--regimes", default="long,half,short")
    parser.add_argument("--plans", default="dense,fast", help="separated by commas")
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    asked = parser.parse_args()
    tasks = [
        Task(regime, precision, plan, asked.worlds, asked.seed, asked.device)
        for regime in asked.regimes.split(",")
        for plan in asked.plans.split(",")
        for precision in asked.precisions.split(",")
    ]
    done: list[dict[str, object]] = []
    with get_context("spawn").Pool(asked.jobs) as pool:
        for result in pool.imap_unordered(measure, tasks):
            done.append(result)
            command = shlex.join(["python", *sys.argv])
            emit(document("precision", done, command), asked.out)  # should time run out
            print(
                {k: v for k, v in result.items() if k not in ("db", "worlds", "device")}, flush=True
            )
    found = {(x["regime"], x["plan"], x["precision"]): x["db"] for x in done if "db" in x}
    for regime, plan, precision in sorted(found):
        rooms, base = found[regime, plan, precision], found.get((regime, plan, BASE))
        line = f"{regime:6} {plan:8} {precision:14} {sum(rooms) / len(rooms):6.2f} dB"
        if base and precision != BASE:
            apart = [x - y for x, y in zip(rooms, base, strict=True)]
            mean = sum(apart) / len(apart)
            spread = math.sqrt(sum((x - mean) ** 2 for x in apart) / max(len(apart) - 1, 1))
            line += (
                f", to {BASE} {mean:+.2f} +- {2 * spread / math.sqrt(len(apart)):.2f}, "
                f"worst room {min(apart):+.2f}, best {max(apart):+.2f}"
            )
        print(line)


if __name__ == "__main__":
    main()
