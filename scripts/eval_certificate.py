"""Hold the certificate against the error of every replayed MLP output, in unseen rooms.

    python scripts/eval_certificate.py --out certificate.json [--device cuda] [--worlds 16]

A line a plan and camera. Frames are made freely, so that errors feed on errors. At the end, on the
CPU, what the certificate adds to a step's time.
"""

from __future__ import annotations

import argparse
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from tachyscope.calibration import Calibration
from tachyscope.evaluation.certificates import certify
from tachyscope.evaluation.clips import CLIPS, make_clip, true_codes
from tachyscope.evaluation.replay_scores import Way, begin
from tachyscope.models.checkpoint import read_tensors
from tachyscope.models.registry import load
from tachyscope.models.vila_u.model import VilaModel
from tachyscope.process import spread
from tachyscope.replay.certificate import Certificate
from tachyscope.results import document, emit
from tachyscope.stream import Stream

PLANS = (
    "replay=attentive:share=0.75", "replay=input:share=0.5", "replay=neurons:share=0.75",
    "replay=neurons:share=0.5", "replay=prune:share=0.75",
)  # fmt: skip


@cache
def parts(device: str, file: Path | None) -> tuple[VilaModel, Calibration]:
    model = VilaModel.narrow(load("atrium-tokens", device=device), "no token model")
    model.calibration = file or model.calibration
    assert model.calibration is not None
    found = Calibration.of(read_tensors(model.calibration), str(model.calibration))
    return model, found


def work(
    device: str, file: Path | None, worlds: int, frames: int, task: tuple[str, str]
) -> list[dict[str, Any]]:
    plan, camera = task
    model, calibration = parts(device, file)
    rows = certify(model, make_clip(camera, worlds), plan, calibration, frames)
    return [{"plan": plan, "clip": camera, "worlds": worlds} | row for row in rows]


@torch.inference_mode()
def cost(file: Path | None, frames: int = 4) -> dict[str, float]:
    """Processor seconds of a frame with and without a certificate, in turn; the least of each."""
    model, calibration = parts("cpu", file)
    clip = make_clip("forward", 1)
    codes, times = true_codes(model, clip), {"plain": [], "certified": []}  # type: ignore[var-annotated]
    for _ in range(2):
        for name, found in times.items():
            watching = [Certificate(calibration)] if name == "certified" else []
            way = Way("replay=attentive:share=0.75")
            stream = Stream(model, begin(model, way, clip, codes, observers=watching))
            for i in range(8, 8 + frames):
                begun = time.process_time()  # others may use the machine meanwhile
                stream.generate(clip.moves[i].tolist())
                found.append(time.process_time() - begun)
    least = {f"seconds_{name}": min(found) for name, found in times.items()}
    return least | {"cost": least["seconds_certified"] / least["seconds_plain"] - 1}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--worlds", type=int, default=16)
    parser.add_argument("--frames", type=int, default=8)
    parser.add_argument("--calibration", type=Path, help="instead of the shipped one")
    parser.add_argument("--plan", action="append")
    parser.add_argument("--clip", action="append", choices=CLIPS)
    args = parser.parse_args()
    tasks = [(plan, clip) for plan in args.plan or PLANS for clip in args.clip or CLIPS]
    one, rows = partial(work, args.device, args.calibration, args.worlds, args.frames), []
    for found in spread(one, tasks, args.jobs, torch.set_num_threads, 1):
        rows += found
        print(found[-1], flush=True)
        made = document("atrium-tokens-certificate", rows, "scripts/eval_certificate.py",
                        model="atrium-tokens")  # fmt: skip
        emit(made, str(args.out))
    torch.set_num_threads(1)
    made |= {"cost": cost(args.calibration)}
    print(made["cost"])
    emit(made, str(args.out))


if __name__ == "__main__":
    main()
