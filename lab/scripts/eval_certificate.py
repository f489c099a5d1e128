"""Hold the certificate against the error of every replayed MLP output, in unseen rooms.

    python lab/scripts/eval_certificate.py --out certificate.json [--device cuda] [--worlds 16]

A line a plan and camera. Frames are made freely, so that errors feed on errors. At the end, on the
CPU, the part of a step's time that the certificate takes.
"""

from __future__ import annotations

import argparse
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tachyscope.core.stream import Stream
from tachyscope.core.types import PassContext
from tachyscope.io.calibration import Calibration
from tachyscope.io.results import document, emit
from tachyscope.models.checkpoint import read_tensors
from tachyscope.models.registry import load
from tachyscope.models.vila_u.model import VilaModel
from tachyscope_lab.evaluation.certificate import Certificate
from tachyscope_lab.evaluation.certificates import certify
from tachyscope_lab.evaluation.clips import CLIPS, make_clip, true_codes
from tachyscope_lab.evaluation.replay_scores import Way, begin
from tachyscope_lab.processes import spread

PLANS = (
    "replay=attentive:share=0.75", "replay=input:share=0.5", "replay=neurons:share=0.75",
    "replay=neurons:share=0.5", "replay=prune:share=0.75",
)  # fmt: skip


@cache
def parts(device: str, file: Path | None) -> tuple[VilaModel, Calibration]:
    model = VilaModel.narrow(load("atrium-tokens", device=device), "no token model")
    model.calibration = file or model.calibration
    assert model.calibration is not None
    if device == "cpu" and model.compiling_pays(1):
        model.compile()
    loaded = Calibration.of(read_tensors(model.calibration), str(model.calibration))
    return model, loaded


_clip = cache(make_clip)  # drawing one takes seconds


def work(
    device: str, file: Path | None, worlds: int, seed: int, frames: int, task: tuple[str, str]
) -> list[dict[str, Any]]:
    plan, camera = task
    model, calibration = parts(device, file)
    rows = certify(model, _clip(camera, worlds, seed), plan, calibration, frames)
    return [{"plan": plan, "clip": camera, "worlds": worlds, "seed": seed} | row for row in rows]


class Clocked(Certificate):
    """Adds up the time that it takes by itself."""

    seconds = 0.0

    def on_mlp(self, ctx: PassContext, x: Tensor, y: Tensor) -> None:
        begun = time.perf_counter()
        super().on_mlp(ctx, x, y)
        self.seconds += time.perf_counter() - begun

    def on_commit(self, ctx: PassContext, n: int) -> None:
        begun = time.perf_counter()
        super().on_commit(ctx, n)
        self.seconds += time.perf_counter() - begun


@torch.inference_mode()
def cost(file: Path | None, frames: int = 4) -> dict[str, float]:
    """Seconds of some frames of one video on one thread, and the certificate's part of them."""
    model, calibration = parts("cpu", file)
    clip, watch = make_clip("forward", 1), Clocked(calibration)
    way, codes = Way("replay=attentive:share=0.75"), true_codes(model, clip)
    stream = Stream(model, begin(model, way, clip, codes, observers=[watch]))
    watch.seconds, begun = 0.0, time.perf_counter()
    for i in range(8, 8 + frames):
        stream.generate(clip.moves[i].tolist())
    whole = time.perf_counter() - begun
    return {"seconds": whole, "seconds_certificate": watch.seconds, "cost": watch.seconds / whole}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--worlds", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0, help="of the rooms")
    parser.add_argument("--frames", type=int, default=8)
    parser.add_argument("--calibration", type=Path, help="instead of the shipped one")
    parser.add_argument("--plan", action="append")
    parser.add_argument("--clip", action="append", choices=CLIPS)
    args = parser.parse_args()
    tasks = [(plan, clip) for plan in args.plan or PLANS for clip in args.clip or CLIPS]
    one = partial(work, args.device, args.calibration, args.worlds, args.seed, args.frames)
    rows: list[dict[str, Any]] = []
    for part in spread(one, tasks, args.jobs, torch.set_num_threads, 1):
        rows += part
        print(part[-1], flush=True)
        made = document("atrium-tokens-certificate", rows, "lab/scripts/eval_certificate.py",
                        model="atrium-tokens")  # fmt: skip
        emit(made, str(args.out))
    torch.set_num_threads(1)
    made |= {"cost": cost(args.calibration)}
    print(made["cost"])
    emit(made, str(args.out))


if __name__ == "__main__":
    main()
