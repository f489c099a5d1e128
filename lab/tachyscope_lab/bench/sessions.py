"""A real server under clients that press keys: key to pixel, turns, memory, sums of its metrics.

The server is a process of its own, and all clients are one more on the same machine. A client has
no screen: a key's time ends when the first picture that it changed has come.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from tachyscope.core.errors import TachyscopeError
from tachyscope.io.results import Document, document
from tachyscope.io.tables import format_table
from tachyscope.serve.protocol import MAIN, SUBPROTOCOL, Header

WARM_S = 30.0  # at most, before anything counts: caches fill, and clients connect
QUIET_S = 1.0  # without a message, after which a paused session has sent everything
ALLOWED_MS = 60.0  # of key to pixel, beside steps
PAUSE = 2**30  # the id of the last message
FPS = 60  # more than any model's here


@dataclass(eq=False)
class Client:
    """What one client saw, once the bench is warm."""

    keys: str  # that it presses
    draw: random.Random
    counting: bool = False
    pressed: dict[int, float] = field(default_factory=dict)  # by id, when; not yet answered
    answered: dict[int, list[float]] = field(default_factory=dict)  # by chunk, when pressed
    key_ms: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)  # when one ended, and its ms
    gaps_s: list[float] = field(default_factory=list)  # between chunks
    chunks: int = 0  # these and the next two from the beginning
    pictures: int = 0
    bytes: int = 0  # of pictures, while it counts
    sent: int = 0  # messages of keys
    last: float = 0.0
    paused: bool = False

    def on_message(self, message: dict[str, Any], now: float) -> None:
        if message["type"] == "chunk":
            self.chunks += 1
            if self.counting:
                self.step_ms.append(message["step_ms"])
                self.waits.append((now, message["wait_ms"]))
                self.gaps_s.append(now - self.last)
            self.last = now
        elif message["type"] == "receipt" and message["phase"] == "applied":
            if message["id"] == PAUSE:
                self.paused = True
            elif (at := self.pressed.pop(message["id"], None)) is not None:
                self.answered.setdefault(message["chunk"], []).append(at)
        elif message["type"] == "error":
            raise TachyscopeError(f"the server refused a session: {message['message']}")

    def on_picture(self, header: Header, now: float) -> None:
        self.pictures += 1
        if header.lane != MAIN:
            return
        for chunk in [one for one in self.answered if one <= header.chunk]:
            self.key_ms += [1e3 * (now - at) for at in self.answered.pop(chunk)]

    async def press(self, socket: ClientConnection, until: float) -> None:
        """Press and release keys at random times, independent of the server's steps."""
        while self.keys and time.monotonic() < until:
            step = statistics.median(self.step_ms[-20:] or [100.0]) / 1e3
            await asyncio.sleep(2 * step * self.draw.random())
            if not self.counting:
                continue
            self.pressed[self.sent + 1] = time.monotonic()
            await self._hold(socket, self.draw.choice(self.keys))
            while self.pressed or self.answered:
                await asyncio.sleep(0.01)
            await self._hold(socket, "")

    async def _hold(self, socket: ClientConnection, action: str) -> None:
        self.sent += 1
        text = json.dumps({"type": "keys", "id": self.sent, "actions": action})
        await socket.send(text)


def bench_sessions(
    model: str = "atrium-world",
    plan: str = "live",
    *,
    clients: int = 1,
    minutes: float = 2.0,
    seed: int = 0,
    kind: str = "jpeg",
    command: str = "",
    on_minute: Callable[[str], None] | None = None,
) -> Document:
    """Serve a model to `clients` clients for `minutes`, after at most `WARM_S` to warm up.

    `kind` is the format of pictures. `on_minute` is called with a progress line every minute.
    """
    seconds = 60 * minutes
    warm = min(WARM_S, seconds)
    load = os.getloadavg()[0]
    most = int(FPS * (seconds + warm)) + FPS
    more = ("--plan", plan, "--set", f"sessions={clients}", "--set", f"session_frames={most}")
    with server(model, *more) as (url, pid, _):
        run = _run(url, pid, clients, warm, seconds, seed, kind, on_minute)
        played, memory, metrics = asyncio.run(run)
    row: Document = {"model": model, "plan": plan, "clients": clients, "seconds": seconds}
    row |= {"format": kind, "kb_per_s": sum(one.bytes for one in played) / 1e3 / seconds}
    row |= _latency(played) | _turns(played) | _memory(memory, seconds)
    row["metrics"] = {
        name: {"told": metric, "counted": counted}
        for name, (metric, counted) in _sums(metrics, played).items()
    }
    row["metrics_add_up"] = all(one["told"] == one["counted"] for one in row["metrics"].values())
    return document("bench-sessions", [row], command, warm_seconds=warm, load_before=load)


def lines(results: Document) -> Iterator[str]:
    """The results for a reader."""
    (row,) = results["rows"]
    shown = {
        "key to pixel, p50 and p95": _ms(row["key_ms_p50"], row["key_ms_p95"]),
        "a step, p50 and p95": _ms(row["step_ms_p50"], row["step_ms_p95"]),
        "(key p50 - 60 ms) / step": f"{row['key_steps']:.2f}" if row["key_steps"] else "–",
        "wait for a turn, mean, p99 and worst": _ms(
            row["wait_ms_mean"], row["wait_ms_p99"], row["wait_ms_worst"]
        ),
        "worst wait / mean": f"{row['wait_worst_over_mean']:.2f}" if row["clients"] > 1 else "–",
        "worst wait / mean of others then": f"{row['wait_worst_beside_others']:.2f}"
        if row["clients"] > 1
        else "–",
        "chunks, fewest and most of a session": "{} and {}".format(*row["chunks"]),
        "longest time without a chunk": f"{row['longest_gap_s']:.2f} s",
        "server's memory, most of both halves": "{:.1f} and {:.1f} MB".format(
            row["rss_mb_first_half"], row["rss_mb_second_half"]
        ),
        "metrics": "add up" if row["metrics_add_up"] else f"do not add up: {row['metrics']}",
    }  # fmt: skip
    yield from format_table(("", ""), list(shown.items()))


def _ms(*values: float | None) -> str:
    return " and ".join("–" if one is None else f"{one:.0f}" for one in values) + " ms"


def _latency(clients: Sequence[Client]) -> Document:
    keys = [x for one in clients for x in one.key_ms]
    steps = [x for one in clients for x in one.step_ms]
    step, key = _quantile(steps, 0.5), _quantile(keys, 0.5)
    return {
        "keys": len(keys),
        "key_ms_p50": key,
        "key_ms_p95": _quantile(keys, 0.95),
        "step_ms_p50": step,
        "step_ms_p95": _quantile(steps, 0.95),
        "key_steps": (key - ALLOWED_MS) / step if key and step else None,
    }


def _turns(clients: Sequence[Client]) -> Document:
    ended = sorted(x for one in clients for x in one.waits)
    waits = [ms for _, ms in ended]
    counts = [len(one.step_ms) for one in clients]
    if not min(counts):
        raise TachyscopeError("a session made no chunk in this time: give more `minutes`")
    means = [statistics.mean(ms for _, ms in one.waits) for one in clients]
    mean = statistics.mean(waits)
    # beside those that ended when it did: how fast the machine was just then does not count
    near = len(clients)
    rounds = [waits[max(0, i - near) : i + near + 1] for i in range(len(waits))]
    beside = [x / max(statistics.mean(r), 1e-9) for x, r in zip(waits, rounds, strict=True)]
    return {
        "chunks": [min(counts), max(counts)],
        "wait_ms_mean": mean,
        "wait_ms_p99": _quantile(waits, 0.99),
        "wait_ms_worst": max(waits),
        "wait_worst_over_mean": max(waits) / max(mean, 1e-9),
        "wait_worst_session_over_mean": max(means) / max(mean, 1e-9),
        "wait_worst_beside_others": max(beside),
        "longest_gap_s": max(x for one in clients for x in one.gaps_s),
    }


def _memory(samples: Sequence[tuple[float, float]], seconds: float) -> Document:
    """The server's memory in MB: the maximum of each half, and a sample a minute.

    Snapshots that are being written raise it for a moment.
    """
    first = [mb for at, mb in samples if at <= seconds / 2]
    last = [mb for at, mb in samples if at >= seconds / 2]
    every = max(1, round(len(samples) * 60 / seconds)) if seconds > 60 else 1
    return {
        "rss_mb_first_half": max(first),
        "rss_mb_second_half": max(last),
        "rss_mb": [round(mb, 1) for _, mb in samples[::every]],
    }


def _sums(metrics: dict[str, float], clients: Sequence[Client]) -> dict[str, tuple[float, float]]:
    """The server's metrics, each with the value that its clients or other metrics imply."""
    chunks = sum(one.chunks for one in clients)
    name = "tachyscope_"
    made, sent, dropped = (
        metrics[f"{name}frames_{what}_total"] for what in ("made", "sent", "dropped")
    )
    return {
        "steps": (metrics[f'{name}steps_total{{lane="main"}}'], chunks),
        "waits": (metrics[f"{name}wait_seconds_count"], chunks),
        "frames made": (made, sent + dropped),
        "frames sent": (sent, sum(one.pictures for one in clients)),
        "keys": (
            metrics.get(f'{name}messages_total{{type="keys"}}', 0.0),
            sum(one.sent for one in clients),
        ),
        "sessions": (metrics[f'{name}sessions{{state="playing"}}'], len(clients)),
    }


def _quantile(values: Sequence[float], share: float) -> float | None:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


@contextmanager
def server(model: str, *more: str) -> Iterator[tuple[str, int, Callable[[], int]]]:
    """Run `tachyscope serve`: its address, its process id, and a function of its log's bytes."""
    command = [sys.executable, "-m", "tachyscope", "serve", model, "--port", "0", *more]
    with (
        tempfile.TemporaryFile("w+") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as served,
    ):
        try:
            assert served.stdout is not None
            words = (word for line in served.stdout for word in line.split())
            url = next((word for word in words if word.startswith("http")), "")
            if not url:
                served.wait()
                stderr.seek(0)
                last = (stderr.read().splitlines() or ["it said nothing"])[-1]
                raise TachyscopeError(last.removeprefix("tachyscope: "))
            yield url.rstrip("/"), served.pid, lambda: os.fstat(stderr.fileno()).st_size
        finally:
            served.terminate()


async def _run(
    url: str,
    pid: int,
    count: int,
    warm: float,
    seconds: float,
    seed: int,
    kind: str,
    on_minute: Callable[[str], None] | None,
) -> tuple[list[Client], list[tuple[float, float]], dict[str, float]]:
    """All clients, the server's memory by seconds of the run, and its metrics at the end."""
    sockets, clients = [], []
    try:
        for i in range(count):
            socket = await join(url)
            sockets.append(socket)
            await socket.send(json.dumps({"type": "open", "seed": seed + i, "format": kind}))
            opened = json.loads(await socket.recv())
            if opened["type"] != "opened":
                raise TachyscopeError(f"the server refused a session: {opened['message']}")
            keys = opened["actions"].strip(".")
            clients.append(Client(keys, random.Random(seed + i), last=time.monotonic()))
        begun = time.monotonic() + warm
        until = begun + seconds
        pairs = list(zip(clients, sockets, strict=True))
        reading = [asyncio.create_task(_read(*one)) for one in pairs]
        pressing = [asyncio.create_task(client.press(s, until)) for client, s in pairs]
        memory = await _watch(clients, reading, pid, begun, until, on_minute)
        await asyncio.gather(*pressing)
        for socket in sockets:
            await socket.send(json.dumps({"type": "pause", "id": PAUSE}))
        await _quiet(clients)
        for task in reading:
            task.cancel()
        with urlopen(f"{url}/metrics") as answer:
            rows = [line for line in answer.read().decode().splitlines() if line[0] != "#"]
        return clients, memory, {one.rpartition(" ")[0]: float(one.split()[-1]) for one in rows}
    finally:
        for socket in sockets:
            await socket.close()


async def join(url: str) -> ClientConnection:
    address = url.replace("http", "ws") + "/v1/sessions"
    for _ in range(100):
        try:
            return await connect(
                address, subprotocols=[Subprotocol(SUBPROTOCOL)], max_size=None, ping_interval=None
            )  # the server pings
        except OSError:
            await asyncio.sleep(0.1)
    raise TachyscopeError("the server did not answer within ten seconds: run this again")


async def _read(client: Client, socket: ClientConnection) -> None:
    try:
        async for message in socket:
            now = time.monotonic()
            if isinstance(message, str):
                client.on_message(json.loads(message), now)
            else:
                client.bytes += len(message) * client.counting
                client.on_picture(Header.read(message)[0], now)
    except ConnectionClosed as closed:
        raise TachyscopeError(f"the server ended a session: {closed}") from closed
    raise TachyscopeError("the server ended a session")


async def _watch(
    clients: Sequence[Client],
    reading: Sequence[asyncio.Task[None]],
    pid: int,
    begun: float,
    until: float,
    on_minute: Callable[[str], None] | None,
) -> list[tuple[float, float]]:
    """Start counting at `begun`, and sample the server's memory every second until `until`."""
    samples: list[tuple[float, float]] = []
    minute = 0
    while (now := time.monotonic()) < until:
        for task in reading:
            if task.done():
                task.result()  # raises
        if now >= begun:
            for client in clients:
                client.counting = True
            samples.append((now - begun, rss_mb(pid)))
            if on_minute is not None and (now - begun) // 60 >= minute:
                chunks = sum(one.chunks for one in clients)
                on_minute(f"minute {minute}: {chunks} chunks, {samples[-1][1]:.1f} MB")
                minute += 1
        await asyncio.sleep(min(1.0, max(0.01, until - now)))
    return samples


async def _quiet(clients: Sequence[Client]) -> None:
    """Wait until all sessions are paused and nothing has come for `QUIET_S`."""
    seen = -1
    while seen != (now := sum(one.chunks + one.pictures for one in clients)) or not all(
        one.paused for one in clients
    ):
        seen = now
        await asyncio.sleep(QUIET_S)


def rss_mb(pid: int) -> float:
    """A process's resident memory in MB; 0 on systems without /proc."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
