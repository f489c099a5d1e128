"""What serving costs beside a plain rollout, on one GPU: one session, then four in turns.

    python lab/scripts/bench_served.py --out DIR [--chunks 16] [--sessions 4]

The engine of `tachyscope serve` runs as the server makes it: same memory, turns, snapshots and
compiled layers. Clients are in this process: their frames are encoded and queued as for a WebSocket
and go no further. Rollout, session, session, rollout are timed one after the other: of the session
all chunks from one snapshot to the next, of the others `--chunks` once they are warm. Random
weights at Self-Forcing's shape, and of Wan's VAE, or of a tiny decoder where diffusers is not
installed. Needs prometheus_client and starlette beside torch, numpy and safetensors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from tachyscope.core.rollout import rollout
from tachyscope.io.results import Document, document, emit
from tachyscope.models.registry import load
from tachyscope.models.wan.tiny_decoder import TinyDecoder
from tachyscope.serve import protocol
from tachyscope.serve.connection import Connection
from tachyscope.serve.engine import SNAPSHOT_CHUNKS, Engine, make_engine
from tachyscope.serve.limits import Limits
from tachyscope.serve.snapshots import Snapshots
from tachyscope_lab.bench.stand_ins import random_vae

WARM = 10  # chunks until a cache of 21 latent frames is full and its CUDA graph recorded
PATIENCE_S = 120.0  # for the next chunk, programs that are compiled included
ENCODERS = 2  # threads, as the server has them
TARGETS = {"one": 0.95, "turns": 0.93, "bytes": 0.10}
Mark = tuple[float, int]  # when a chunk was there, and its frames


class Client:
    """A WebSocket that goes nowhere, and what came through it."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []
        self.pictures = 0
        self.snapshots: list[float] = []  # when one was written
        self.applied: set[int] = set()
        self.fault = ""
        self._inbox: asyncio.Queue[dict[str, str]] = asyncio.Queue()

    def send(self, kind: str, **fields: Any) -> None:
        text = json.dumps({"type": kind, **fields})
        self._inbox.put_nowait({"type": "websocket.receive", "text": text})

    async def receive(self) -> Any:
        return await self._inbox.get()

    async def send_text(self, data: str) -> None:
        message = json.loads(data)
        match message["type"]:
            case "chunk":
                self.marks.append((time.perf_counter(), message["frames"]))
            case "snapshot":
                self.snapshots.append(time.perf_counter())
            case "receipt" if message["phase"] == "applied":
                self.applied.add(message["id"])
            case "error":
                self.fault = message["message"]

    async def send_bytes(self, data: bytes) -> None:
        self.pictures += 1

    async def close(self, code: int, reason: str | None) -> None:
        self.fault = self.fault or f"closed with {code}: {reason}"

    async def until(self, done: Callable[[], bool]) -> None:
        begun, seen = time.perf_counter(), -1
        while not done():
            if len(self.marks) != seen:
                begun, seen = time.perf_counter(), len(self.marks)
            if self.fault or time.perf_counter() - begun > PATIENCE_S:
                raise RuntimeError(self.fault or f"no chunk in {PATIENCE_S:g} s")
            await asyncio.sleep(0.01)


def time_rollout(model: Any, plan: str, chunks: int) -> Document:
    """A user's own rollout, once it is warm."""
    each = model.pixel_frames(2 * model.shape().chunk) - model.pixel_frames(model.shape().chunk)
    marks, graphs = [], []
    for chunk in rollout(model, plan, frames=(WARM + chunks + 2) * each):
        marks.append((time.perf_counter(), len(chunk.frames)))
        graphs.append(chunk.stats["cuda_graph"])
    late = marks[WARM - 1 : WARM + chunks]  # the last ones have no other decoded beside them
    return {"fps": _rate(late), "chunk_ms": _gaps(late), "graphs": sum(graphs[WARM:])}


async def time_sessions(engine: Engine, count: int, chunks: int) -> Document:
    """Sessions that play at once, each opened and warm before the next; so many chunks each.

    One that goes beyond two snapshots is timed from the first to the second.
    """
    clients = [Client() for _ in range(count)]
    pool, tasks, used = ThreadPoolExecutor(ENCODERS), [], [_used(engine.model.device)]
    try:
        for i, client in enumerate(clients):
            client.send("open", seed=i, pace="free")
            tasks.append(asyncio.create_task(Connection(client, engine, pool).run()))
            await client.until(lambda one=client: len(one.marks) >= WARM)
            client.send("pause", id=1, paused=True)
            await client.until(lambda one=client: 1 in one.applied)
            used.append(_used(engine.model.device))
        before = [len(one.marks) for one in clients]
        for client in clients:
            client.send("pause", id=2, paused=False)
        for client, start in zip(clients, before, strict=True):
            # the first is where the time begins
            await client.until(lambda one=client, n=start + 1 + chunks: len(one.marks) >= n)
        late = [one.marks[start:] for one, start in zip(clients, before, strict=True)]
        first, marks = clients[0], clients[0].marks
        if len(marks) >= 2 * SNAPSHOT_CHUNKS:
            late = [marks[SNAPSHOT_CHUNKS - 1 : 2 * SNAPSHOT_CHUNKS]]
        result = _turns(late) | {"used_bytes": used}
        if len(marks) >= 2 * SNAPSHOT_CHUNKS:
            written = first.snapshots[0] if first.snapshots else time.perf_counter()
            result["snapshot_s"] = written - marks[SNAPSHOT_CHUNKS - 1][0]
            result["fps_before_snapshot"] = _rate(marks[before[0] : SNAPSHOT_CHUNKS])
        lanes = [live.lane for live in engine.room.sessions.values() if live.lane]
        result["graphs"] = sum(lane.stream.runner.replayed for lane in lanes)
        result["pictures"] = sum(one.pictures for one in clients)
        return result
    finally:
        for client in clients:
            client.send("close")
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE_S)
        await asyncio.to_thread(engine.keeper.wait)
        pool.shutdown()


def _turns(marks: Sequence[Sequence[Mark]]) -> Document:
    """Frames/s of all together while all of them play."""
    begun, end = max(one[0][0] for one in marks), min(one[-1][0] for one in marks)
    together = sorted(mark for one in marks for mark in one if begun <= mark[0] <= end)
    each = [sum(n for at, n in one if begun < at <= end) / (end - begun) for one in marks]
    return {"fps": _rate(together), "chunk_ms": _gaps(together), "fps_each": each}


def _rate(marks: Sequence[Mark]) -> float:
    return sum(n for _, n in marks[1:]) / (marks[-1][0] - marks[0][0])


def _gaps(marks: Sequence[Mark]) -> list[float]:
    return [round(1e3 * (b[0] - a[0]), 1) for a, b in zip(marks, marks[1:], strict=False)]


def _used(device: torch.device) -> int:
    """Bytes of the device that this process and others hold, gaps left out."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def compare(row: Document) -> None:
    """The ratios that are asked for, of the parts that are there."""
    rollouts, ones = row["rollout"], row["one"]
    if rollouts and ones:
        row["one_over_rollout"] = mean(x["fps"] for x in ones) / mean(x["fps"] for x in rollouts)
    if len(rollouts) > 1:
        fps = [x["fps"] for x in rollouts]
        row["rollout_spread"] = max(fps) / min(fps)
    if ones and "turns" in row:
        # sessions in turns are timed between two snapshots, so one is too
        one = mean(x.get("fps_before_snapshot", x["fps"]) for x in ones)
        row["turns_over_one"] = row["turns"]["fps"] / one
        used = row["turns"]["used_bytes"]
        row["bytes_a_session"] = [b - a for a, b in zip(used, used[1:], strict=False)]
        # the first brings what sessions share: programs, workspaces of libraries
        later = row["bytes_a_session"][1:] or [0]
        row["bytes_over_reserved"] = mean(later) / row["reserved_bytes"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="self-forcing")
    parser.add_argument("--plan", default="live")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--sessions", type=int, default=4)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    published = options.model not in ("toy-chunks", "atrium-world")
    weights = "random" if published else None
    begun = time.perf_counter()
    model: Any = load(options.model, weights, device=options.device, dtype=options.dtype)
    if published and find_spec("diffusers") is not None:  # as large as the published one
        model.decoder = random_vae(model.config.in_channels, model.dtype)
    elif published:
        model.decoder = TinyDecoder.read("random-tiny", model.config, model.device, model.dtype)
    row: Document = {
        "model": options.model, "plan": options.plan, "decoder": model.decoder_name,
        "encoder": "jpeg", "targets": TARGETS, "snapshot_chunks": SNAPSHOT_CHUNKS,
        "rollout": [], "one": [], "faults": [],
    }  # fmt: skip
    if find_spec("PIL") is None:  # costs more than JPEG does
        row["encoder"] = "zlib"
        protocol.encode = lambda frame, *_: zlib.compress(frame.tobytes(), 1)

    def part(name: str, work: Callable[[], Document]) -> None:
        """One part, written as soon as it is done; a fault in it ends no other."""
        try:
            done = work()
        except Exception as fault:
            row["faults"].append(f"{name}: {type(fault).__name__}: {fault}"[:500])
            done = {}
        if done and isinstance(row.get(name), list):
            row[name].append(done)
        elif done:
            row[name] = done
        compare(row)
        command = shlex.join([Path(sys.executable).name, *sys.argv])
        results = document("served", [row], command, device=model.device.type)
        emit(results, str(options.out / "served.json"))
        shown = {key: value for key, value in done.items() if key != "chunk_ms"}
        print(
            f"{time.perf_counter() - begun:.0f} s, {name}: {shown or row['faults'][-1]}", flush=True
        )

    period = 2 * SNAPSHOT_CHUNKS - WARM
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(model, options.model, Snapshots(folder), options.plan, Limits())
        row["reserved_bytes"] = engine.room.bytes_of(options.plan)
        row["budget_bytes"] = engine.room.budget
        engine.start()
        try:
            for name in ("rollout", "one", "one", "rollout"):
                if name == "rollout":
                    part(name, lambda: time_rollout(model, options.plan, options.chunks))
                else:
                    part(name, lambda: asyncio.run(time_sessions(engine, 1, period)))
            if options.sessions:
                many = options.sessions, options.chunks
                part("turns", lambda: asyncio.run(time_sessions(engine, *many)))
        finally:
            engine.stop()
    ratios = ("one_over_rollout", "rollout_spread", "turns_over_one", "bytes_over_reserved")
    print({name: round(row[name], 4) for name in ratios if name in row}, row["faults"], flush=True)


if __name__ == "__main__":
    main()
