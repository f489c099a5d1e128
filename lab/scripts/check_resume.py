"""Kill a process in the midst of a video, go on from its last snapshot, and compare the frames.

    python lab/scripts/check_resume.py --out out --device cuda --dtype bfloat16

The video is made three times: by this process, by another that is killed with SIGKILL, and by this
one from the killed one's snapshots. Frames must be equal to the bit, those before the kill too.
Self-Forcing's shape and a tiny decoder, random weights. Results are in DIR/resume.json, a row a
plan. Ends with 1 where frames differ.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tachyscope as ts
from tachyscope.core.errors import first_line
from tachyscope.core.request import chunks_for
from tachyscope.core.stream import Stream
from tachyscope.io.results import Document, document, emit
from tachyscope.models.base import VideoModel
from tachyscope.snapshot.folder import Snapshots

# a snapshot has all that is resident: 0.29 GB a latent frame of Wan 1.3B at 480x832
PLANS = (
    "cache=bank:resident=12f,budget=63f,host=int8 attention=ann:read=0.6 text=pads",
    "live cache=dedup:budget=12f",
)


def load(args: argparse.Namespace) -> VideoModel:
    made: dict[str, Any] = {"device": args.device, "dtype": args.dtype}
    if not args.model.startswith("toy"):
        made |= {"weights": "random", "decoder": "random-tiny"}
    return ts.load(args.model, **made)


def open_stream(model: VideoModel, plan: str, frames: int) -> Stream:
    return ts.open(model, plan, prompt="a red floor", seed=3, frames=frames)


def hashes(stream: Stream, chunks: int) -> Iterator[str]:
    for _ in range(chunks):
        yield hashlib.sha256(stream.step().frames.tobytes()).hexdigest()


def play_to_be_killed(args: argparse.Namespace) -> None:
    """Tell every chunk's hash; a snapshot every so many chunks."""
    stream = open_stream(load(args), args.plan[0], args.frames)
    snapshots = Snapshots(args.snapshots)
    for i, value in enumerate(hashes(stream, args.chunks), 1):
        print(value, flush=True)
        if i % args.every == 0:
            snapshots.save(stream)


def kill_one(args: argparse.Namespace, plan: str, folder: Path, chunks: int) -> list[str]:
    """Another process's hashes, until it was killed in the midst of the chunk after."""
    shared = ("out", "model", "device", "dtype", "frames", "every")
    own = {"plan": plan, "snapshots": folder, "chunks": chunks}
    given = {name: getattr(args, name) for name in shared} | own
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    killed: list[str] = []
    with subprocess.Popen(
        [sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        for line in other.stdout:
            killed.append(line.strip())
            if len(killed) == args.kill:
                other.kill()
                break
    return killed


def check(args: argparse.Namespace, model: VideoModel, plan: str) -> Document:
    folder, begun = args.out / "snapshots", time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    with open_stream(model, plan, args.frames) as stream:
        chunks = chunks_for(model, stream.session.shape.chunk, 0, args.frames)
        whole = list(hashes(stream, chunks))
    if not args.every < args.kill < chunks:
        sys.exit(f"--kill is after a snapshot and before the last of {chunks} chunks")
    killed = kill_one(args, plan, folder, chunks)
    size = sum(path.stat().st_size for path in folder.iterdir())
    with open_stream(model, plan, args.frames) as stream:
        Snapshots(folder).load(stream)
        at = stream.session.memory.chunk
        rest = list(hashes(stream, chunks - at))
    shutil.rmtree(folder)
    return {
        "name": "resume", "plan": plan, "model": model.name, "frames": args.frames,
        "chunks": chunks, "killed_after": len(killed), "resumed_at": at, "snapshot_mb": size / 1e6,
        "equal": killed == whole[: len(killed)] and rest == whole[at:],
        "seconds": time.monotonic() - begun,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="self-forcing")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--frames", type=int, default=240)
    parser.add_argument("--every", type=int, default=6, help="chunks between two snapshots")
    parser.add_argument("--kill", type=int, default=14, help="chunks after which it is killed")
    parser.add_argument("--plan", action="append", default=[])
    parser.add_argument("--snapshots", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--chunks", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.snapshots is not None:
        play_to_be_killed(args)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    model, rows = load(args), []
    command = f"python lab/scripts/check_resume.py {' '.join(sys.argv[1:])}"
    for plan in args.plan or PLANS:
        try:
            rows.append(check(args, model, plan))
        except Exception as fault:  # the other plan's turn comes all the same
            rows.append({"name": "resume", "plan": plan, "fault": first_line(fault)})
        print(rows[-1], flush=True)
        emit(document("resume", rows, command), str(args.out / "resume.json"))
    return 0 if all(row.get("equal") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
