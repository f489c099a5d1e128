"""How far rounding alone moves a plan's rooms: the same rollouts in batches of several sizes.

    python lab/scripts/check_rounding.py --out out/rounding.json [--device cuda] [--batches 16,4]

Rooms and noise are the same in every batch; only the order in which kernels sum differs. The row of
a plan has every room's revisit in dB by batch, and the largest difference of one room.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

import torch

from tachyscope.io.results import Document, document, emit
from tachyscope_lab.evaluation.batched_rollout import play
from tachyscope_lab.evaluation.judges import judge
from tachyscope_lab.evaluation.world import Request, measured_dtype, scenes_of, world_models

PLANS = (
    "dense",
    "balanced",
    "fast",
    "live",
)


def revisits(args: argparse.Namespace, plan: str, batch: int) -> list[float]:
    """The revisit in dB of every room, so many rooms at a time."""
    model, _ = world_models(None, args.device)
    request = Request((plan,), args.seed, args.frames)
    given, values = len(request.given), list[float]()
    numbers = tuple(range(args.worlds))
    scenes = scenes_of(args.seed, numbers, request.given + request.walk, model.device, 1.0)
    for start in range(0, args.worlds, batch):
        some = scenes[start : start + batch]
        takes = play(model, plan, some, given)
        values += [
            judge(take.frames, scene, given)["revisit_db"]
            for take, scene in zip(takes, some, strict=True)
        ]
    return values


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the file of results")
    parser.add_argument("--plan", action="append", help="instead of the four that are measured")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batches", default="16,4", help="rooms at a time, separated by commas")
    parser.add_argument("--worlds", type=int, default=16)
    parser.add_argument("--frames", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    model, _ = world_models(None, args.device)
    rows: list[Document] = []
    for plan in args.plan or PLANS:
        by_batch = {n: revisits(args, plan, int(n)) for n in args.batches.split(",")}
        apart = torch.tensor(list(by_batch.values()))
        row: Document = {
            "name": "rounding", "plan": plan, "model": model.name, "device": args.device,
            "dtype": measured_dtype(args.device),
            "frames": args.frames, "worlds": args.worlds, "revisit_db": by_batch,
            "most_apart_db": float((apart.amax(0) - apart.amin(0)).max()),
            "means_apart_db": float(apart.mean(1).max() - apart.mean(1).min()),
        }  # fmt: skip
        rows.append(row)
        print(plan, f"{row['most_apart_db']:.2f} dB in one room", flush=True)
        command = shlex.join(["python", "lab/scripts/check_rounding.py", *argv])
        emit(document("rounding", rows, command, fingerprint=model.fingerprint), str(args.out))


if __name__ == "__main__":
    main(sys.argv[1:])
