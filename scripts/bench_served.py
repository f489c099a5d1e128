"""What serving costs beside a plain rollout, on one GPU: one session, then four in turns.

    python scripts/bench_served.py --out DIR [--chunks 30] [--sessions 4]

The server's engine runs in this process, without HTTP: sessions take turns as they do there, and
their frames are decoded and handed over. A rollout and one session run by turns, `--rounds` times.
Random weights at Self-Forcing's shape. Needs prometheus_client beside torch, numpy and safetensors.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tachyscope.models.registry import load
from tachyscope.models.wan.vae import WanVae
from tachyscope.results import Document, document, emit
from tachyscope.rollout import rollout
from tachyscope.serve import protocol
from tachyscope.serve.engine import Engine
from tachyscope.serve.limits import Limits
from tachyscope.serve.live import Show, Told
from tachyscope.serve.metrics import Metrics
from tachyscope.serve.snapshots import Snapshots

WARM = 12  # chunks until a cache of 21 latent frames is full and its CUDA graph recorded
TARGETS = {"one": 0.95, "turns": 0.93}


def rate_of_rollout(model: Any, plan: str, chunks: int, frames: int) -> float:
    """Frames/s of a rollout, once it is warm."""
    marks = []
    for chunk in rollout(model, plan, frames=(WARM + chunks) * frames):
        marks.append((time.perf_counter(), len(chunk.frames)))
    return _rate(marks)


def _rate(marks: list[tuple[float, int]]) -> float:
    late = marks[WARM - 1 :]
    return sum(n for _, n in late[1:]) / (late[-1][0] - late[0][0])


def make_engine(model: Any, name: str, plan: str, folder: str) -> Engine:
    return Engine(
        model, name, Snapshots(folder), plan=plan, budget=10**15, limits=Limits(),
        metrics=Metrics(), snapshot_chunks=10**9,
    )  # fmt: skip


def rates_of_sessions(engine: Engine, count: int, chunks: int) -> tuple[list[float], list[int]]:
    """Frames/s of every session while all of them play, and bytes on the device after each."""
    marks: list[list[tuple[float, int]]] = [[] for _ in range(count)]
    held, lives = [], []

    def listen(i: int) -> Any:
        def tell(message: Told) -> None:
            if isinstance(message, Show):
                marks[i].append((time.perf_counter(), len(message.frames)))

        return tell

    for i in range(count):
        opening = protocol.Open(seed=i, pace="free")
        live = engine.call(lambda o=opening, i=i: engine.open(o, listen(i))).result()
        lives.append(live)
        while len(marks[i]) < WARM:  # its CUDA graph is there
            time.sleep(0.05)
        held.append(_allocated(engine.model.device))
    begun = max(one[-1][0] for one in marks)
    for one in marks:  # what counts begins now
        one.clear()
    while any(len(one) < chunks for one in marks):
        time.sleep(0.05)
    rates = []
    end = min(one[-1][0] for one in marks)
    for one in marks:
        within = [n for at, n in one if begun < at <= end]
        rates.append(sum(within) / (end - begun))
    for live in lives:
        engine.call(lambda one=live: engine.close(one)).result()
    return rates, held


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="self-forcing")
    parser.add_argument("--plan", default="fast")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--chunks", type=int, default=30)
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    published = options.model not in ("toy-chunks", "atrium-world")
    weights = "random" if published else None
    model: Any = load(options.model, weights, device=options.device, dtype=options.dtype)
    if published:  # as large as the published one
        model.decoder = WanVae.sized(model.config.in_channels, model.dtype)
    frames = model.pixel_frames(2 * model.shape().chunk) - model.pixel_frames(model.shape().chunk)
    row: Document = {"model": options.model, "plan": options.plan, "rollout": [], "one": []}
    device = model.device.type

    def write() -> None:
        command = shlex.join([Path(sys.executable).name, *sys.argv])
        emit(document("served", [row], command, device=device), str(options.out / "served.json"))
        print({key: value for key, value in row.items() if key != "plan"}, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(model, options.model, options.plan, folder)
        row["reserved_bytes"] = engine.room.bytes_of(options.plan)
        engine.start()
        try:
            for _ in range(options.rounds):
                row["rollout"].append(rate_of_rollout(model, options.plan, options.chunks, frames))
                write()
                (rate,), _ = rates_of_sessions(engine, 1, options.chunks)
                row["one"].append(rate)
                write()
            rates, held = rates_of_sessions(engine, options.sessions, options.chunks)
            row["turns"], row["allocated_bytes"] = rates, held
            row["one_over_rollout"] = statistics.median(row["one"]) / statistics.median(
                row["rollout"]
            )
            row["turns_over_one"] = sum(rates) / statistics.median(row["one"])
            row["rollout_spread"] = max(row["rollout"]) / min(row["rollout"])
            steps = [b - a for a, b in zip(held, held[1:], strict=False)]
            row["bytes_a_session"] = steps
            row["targets"] = TARGETS
            write()
        finally:
            engine.stop()


if __name__ == "__main__":
    main()
