"""One server on a GPU under 1, 2, 4 and 8 clients that press keys, by the server's own path.

    python lab/scripts/bench_served.py --out served.json [--sessions 1,2,4,8] [--seconds 20]

`tachyscope serve` is a process of its own, and its clients are one more, as in `tachyscope-lab
bench sessions`: by default LingBot-World at 480x832 with random weights and a tiny decoder. For
every count of sessions a row has the frames a second of each, key to pixel, waits, the pictures'
bytes a second, and the bytes of the GPU that are taken beside those of the row before.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys

import torch

from tachyscope.io.results import Document, check_json, document, emit
from tachyscope_lab.bench.sessions import FPS, _latency, _run, _turns, server

WARM_S = 8.0  # before anything counts, once the first session has made the server warm
FIRST_S = 45.0  # a model is compiled for its first chunks


def used_bytes(device: str) -> int:
    """Bytes of the GPU that all processes hold."""
    if not device.startswith("cuda"):
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def measure(
    url: str, pid: int, count: int, warm: float, seconds: float, kind: str
) -> tuple[Document, int]:
    """A row of so many sessions, and how many frames a chunk has."""
    played, _, _ = asyncio.run(_run(url, pid, count, warm, seconds, 0, kind, None))
    frames = [one.pictures / max(1, one.chunks) for one in played]
    row: Document = {"clients": count, "seconds": seconds, "format": kind}
    row |= _latency(played) | _turns(played)
    row["fps_each"] = [
        f * len(one.step_ms) / seconds for f, one in zip(frames, played, strict=True)
    ]
    row["kb_per_s"] = sum(one.bytes for one in played) / 1e3 / seconds
    return row, round(max(frames))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", required=True, help="a JSON file of all rows")
    parser.add_argument("--model", default="lingbot-world")
    parser.add_argument("--weights", action="append", help="of the server; random unless given")
    parser.add_argument("--plan", default="live")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sessions", default="1,2,4,8", help="counts, separated by commas")
    parser.add_argument("--seconds", type=float, default=20.0, help="that each count is timed")
    parser.add_argument("--warm", type=float, default=FIRST_S, help="seconds before the first")
    parser.add_argument("--format", default="jpeg")
    args = parser.parse_args(argv)
    check_json(args.out)
    counts = [int(word) for word in args.sessions.split(",")]
    weights = args.weights
    if weights is None:
        weights = ["random", "decoder=random-tiny"] if args.model == "lingbot-world" else []
    most = int(FPS * (args.warm + (args.seconds + WARM_S) * len(counts))) + FPS
    more = ["--plan", args.plan, "--device", args.device]
    more += ["--set", f"sessions={max(counts)}", "--set", f"session_frames={most}"]
    for word in weights:
        more += ["--weights", word]
    rows: list[Document] = []
    used = used_bytes(args.device)
    with server(args.model, *more) as (url, pid, _):
        warm = args.warm
        for count in counts:
            row, frames = measure(url, pid, count, warm, args.seconds, args.format)
            now, warm = used_bytes(args.device), WARM_S
            row |= {"model": args.model, "plan": args.plan, "frames_chunk": frames}
            row |= {"gpu_bytes": now, "gpu_bytes_more": now - used}
            used = now
            rows.append(row)
            command = shlex.join(["python", "lab/scripts/bench_served.py", *argv])
            emit(document("bench-served", rows, command, device=args.device), args.out)
            print(
                f"{count} sessions: {min(row['fps_each']):.1f} to {max(row['fps_each']):.1f} "
                f"frames/s each, key to pixel p50 {row['key_ms_p50'] or 0:.0f} ms, a step "
                f"{row['step_ms_p50']:.0f} ms, wait p99 {row['wait_ms_p99']:.0f} ms, "
                f"{row['kb_per_s']:.0f} kB/s",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
