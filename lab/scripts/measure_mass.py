"""How much attention goes to frames that were given, and how much to drawn ones, over a rollout.

    python lab/scripts/measure_mass.py --out mass.json [--regime half] [--rooms 4]

The mass is of the last denoising pass of a chunk, the mean over layers, heads, queries and rooms;
a plan that weighs the past is asked with its weights. Caches keep everything here, so that an entry
stands where its latent frame does.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections import defaultdict
from collections.abc import Mapping
from statistics import mean

import torch
from torch import Tensor

from tachyscope.core.observers import Observer
from tachyscope.core.session import Session
from tachyscope.core.types import PassContext
from tachyscope.io.results import document, emit
from tachyscope.models.registry import load
from tachyscope.models.wan.model import WanModel
from tachyscope_lab.evaluation.batched_rollout import open_scenes
from tachyscope_lab.evaluation.regimes import REGIMES, scenes_of
from tachyscope_lab.evaluation.world import measured_dtype

PLANS = ("dense", "lossless attention=dense:past_weight=4")
NEWEST = 3  # latent frames that no plan weighs
PARTS = 3  # of a rollout, a row each


class Mass(Observer):
    """The share of attention by the age of what it goes to, chunk by chunk."""

    def __init__(self, given: int) -> None:
        self.given, self.chunks = given, defaultdict[int, list[dict[str, float]]](list)

    def on_open(self, session: Session) -> None:
        self.session = session

    def on_attend(
        self, ctx: PassContext, q: Tensor, k: Tensor, v: Tensor, rotated_q: Tensor, out: Tensor
    ) -> None:
        drawn = ctx.past // ctx.shape.tokens_per_frame - self.given
        if ctx.given or ctx.pass_index != ctx.pass_count - 2 or drawn < NEWEST:
            return
        scores = rotated_q.float() @ self.session.memory.layers[ctx.layer].keys(ctx).float().mT
        scores /= math.sqrt(q.shape[3])
        p = self.session.present.layers[ctx.layer]
        weights = self.session.plan.attention.log_weights(p)
        if weights is not None:
            scores += weights.unsqueeze(2)
        frames = scores.softmax(-1).mean((0, 1, 2)).unflatten(0, (-1, ctx.shape.tokens_per_frame))
        of = frames.sum(1)
        past, newest = self.given + drawn, self.given + drawn - NEWEST
        self.chunks[drawn].append({
            "given": float(of[: self.given].sum()),
            "drawn": float(of[self.given : newest].sum()),
            "newest": float(of[newest:past].sum()),
            "present": float(of[past:].sum()),
        })  # fmt: skip


@torch.inference_mode()
def measure(
    model: WanModel, name: str, plan: str, rooms: int, seed: int
) -> list[Mapping[str, object]]:
    regime = REGIMES[name]
    watch = Mass(len(regime.given))
    stream = open_scenes(model, plan, scenes_of(regime, seed, rooms, model.device), watch.given)
    stream.session.watch(watch)
    for action in regime.walk:
        stream.generate([model.actions.index(action)])
    drawn, rows = sorted(watch.chunks), list[Mapping[str, object]]()
    step = math.ceil(len(drawn) / PARTS)
    for first in range(0, len(drawn), step):
        part = drawn[first : first + step]
        found = [x for chunk in part for x in watch.chunks[chunk]]
        shares = {key: mean(x[key] for x in found) for key in found[0]}
        rows.append({"plan": plan, "regime": name, "drawn_frames": [part[0], part[-1]]} | shares)
    return rows


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--regime", default="half", choices=REGIMES)
    parser.add_argument("--rooms", type=int, default=4)
    parser.add_argument("--seed", type=int, default=777)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(argv)
    dtype = measured_dtype(args.device)
    model = WanModel.narrow(load("atrium-world", device=args.device, dtype=dtype), fault="a world")
    rows = [
        row for plan in PLANS for row in measure(model, args.regime, plan, args.rooms, args.seed)
    ]
    for row in rows:
        print(row)
    command = shlex.join(["python", "lab/scripts/measure_mass.py", *argv])
    emit(
        document(
            "world-regimes", rows, command, seed=args.seed, worlds=args.rooms,
            fingerprint=model.fingerprint, dtype=dtype,
        ),
        args.out,
    )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
