"""Sessions of one plan in one batch or in turns: which makes more frames of a CPU's time.

    python lab/scripts/bench_batch.py --out FILE [--models toy-chunks,atrium-world] [--sessions 2,4]

A batch is given the best case: all sessions begin together, take the same actions, and never wait
for one another. A round of turns and one of the batch follow each other, and each is timed by the
process's own CPU seconds, which other work on the machine does not add to.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from tachyscope.core.opening import open as open_stream
from tachyscope.io.results import Document, document, emit
from tachyscope.models.base import VideoModel
from tachyscope.models.registry import load

FULL = 24  # chunks until a window of 21 latent frames is full


def measure(model: VideoModel, plan: str, count: int, rounds: int) -> Document:
    """CPU seconds of a chunk of every session, decoding included."""
    alone = [open_stream(model, plan, seed=seed) for seed in range(count)]
    batch = open_stream(model, plan, seed=list(range(count)))

    def turns() -> None:
        for one in alone:
            one.step()

    def together() -> None:
        batch.step()

    for _ in range(FULL):
        turns()
        together()
    pairs = [(_spent(turns), _spent(together)) for _ in range(rounds)]
    return {
        "model": model.name,
        "plan": plan,
        "sessions": count,
        "turns_s": median(x for x, _ in pairs),
        "batch_s": median(x for _, x in pairs),
        "batch_speedup": median(x / y for x, y in pairs),
        # in turns a session's chunk is there after its own; of a batch after all of them
        "chunk_s_in_turns": median(x for x, _ in pairs) / count,
        "rounds": rounds,
    }


def _spent(work: Callable[[], None]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default="toy-chunks,atrium-world")
    parser.add_argument("--sessions", default="2,4")
    parser.add_argument("--plan", default="live")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    load_before, rows = os.getloadavg()[0], []
    for name in options.models.split(","):
        model = load(name)
        for count in map(int, options.sessions.split(",")):
            rows.append(measure(model, options.plan, count, options.rounds))
            print(rows[-1], flush=True)
    command = shlex.join([Path(sys.executable).name, *sys.argv])
    emit(document("batch", rows, command, load_before=load_before), str(options.out))


if __name__ == "__main__":
    main()
