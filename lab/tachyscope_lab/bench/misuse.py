"""Load test: eight misusing clients attack a real server while one honest session plays on it.

Each client has its own loopback address and seed, and draws one attack after another: endless
bodies, invalid text, tabs that leave, bursts of costly messages, requests that never end, logs of
the maximum size, broken frames. Measured are the honest session's chunks, keys and waits, and the
server's memory and log.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException
from websockets.typing import Subprotocol

from tachyscope.core.errors import TachyscopeError
from tachyscope.io.results import Document, document
from tachyscope.io.tables import format_table
from tachyscope.serve.protocol import MAIN, SUBPROTOCOL, Header
from tachyscope_lab.bench.sessions import join, rss_mb, server

ATTACKERS = 8
ALONE_S = 10.0  # the honest session plays alone first
WARM_S = 10.0  # misuse that is not measured yet
HEALTH_S = 120.0  # limit for an answer of /health, on a loaded machine
REST_S = 0.3  # at most, between two attacks of a client
HALF = "\ud800"  # half of a surrogate pair
BROKEN = ["", "[" * 5000, '{"type":', "null", '{"type": "open"}', '{"type": "keys", "actions": 3}']


@dataclass(eq=False)
class Honest:
    """Measurements of the honest session."""

    chunks: list[tuple[int, float]] = field(default_factory=list)  # number and time
    alone: list[float] = field(default_factory=list)  # times of chunks before misuse begins
    wait_ms: list[float] = field(default_factory=list)
    pressed: int = 0
    applied: int = 0
    pictures: int = 0
    health_s: list[float] = field(default_factory=list)


@dataclass(eq=False)
class Attacker:
    """One misusing client."""

    url: str
    address: str
    draw: random.Random
    done: Counter[str] = field(default_factory=Counter)

    async def run(self, begun: float, until: float) -> None:
        await asyncio.sleep(begun - time.monotonic())
        attacks: dict[str, Callable[[], Awaitable[None]]] = {
            "endless body": self.endless_body,
            "no text": self.no_text,
            "tabs": self.tabs,
            "resets": self.resets,
            "large logs": self.large_logs,
            "half requests": self.half_requests,
            "slow body": self.slow_body,
            "headers": self.headers,
            "broken messages": self.broken,
            "wrong resume": self.wrong_resume,
            "videos": self.videos,
            "unread": self.unread,
        }
        while time.monotonic() < until:
            name = self.draw.choice(list(attacks))
            # an attack should be refused, cut off or closed
            with suppress(OSError, WebSocketException, TimeoutError, asyncio.IncompleteReadError):
                await asyncio.wait_for(attacks[name](), 15)
            self.done[name] += 1
            await asyncio.sleep(REST_S * self.draw.random())

    async def request(
        self, *parts: bytes, read: bool = True, hold_s: float = 0.0, wait_s: float = 5.0
    ) -> bytes:
        port = int(self.url.rpartition(":")[2])
        local = (self.address, 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=local)
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
            await asyncio.sleep(hold_s)
            return await asyncio.wait_for(reader.read(65_536), wait_s) if read else b""
        finally:
            writer.transport.abort()

    async def post(self, fields: Any) -> bytes:
        body = json.dumps(fields).encode()
        more = ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return await self.request(_head("POST /v1/videos", *more) + body)

    async def endless_body(self) -> None:
        length = ["Content-Length: 5"] if self.draw.random() < 0.5 else []
        kind = ["Content-Type: application/json", "Transfer-Encoding: chunked"]
        piece = b"10000\r\n" + b"A" * 65_536 + b"\r\n"
        await self.request(_head("POST /v1/videos", *length, *kind), *[piece] * 64)

    async def no_text(self) -> None:
        name = self.draw.choice(["prompt", "plan", "actions", "size", HALF])
        await self.post({name: f"a{HALF}" if self.draw.random() < 0.5 else "a\0"})

    async def tabs(self) -> None:
        for _ in range(3):
            async with self.session():
                await asyncio.sleep(0.3 * self.draw.random())

    async def resets(self) -> None:
        async with self.session() as socket:
            for i in range(30):
                plan = f"live attention=ann:read={0.3 + 0.5 * self.draw.random():.4f}"
                kind = self.draw.choice(["reset", "reset", "rewind", "beside", "map", "log"])
                fields: dict[str, dict[str, Any]] = {
                    "reset": {"plan": plan},
                    "rewind": {"chunk": 99},
                    "beside": {"mode": self.draw.choice(["off", "turns"])},
                }
                message = {"type": kind, "id": i} | fields.get(kind, {})
                await socket.send(json.dumps(message))

    async def large_logs(self) -> None:
        async with self.session() as socket:
            for _ in range(6):
                log = {"version": 1, "steps": ["w" * 100] * 9_000}
                await socket.send(json.dumps({"type": "replay", "log": log}))

    async def half_requests(self) -> None:
        half = b"GET / HTTP/1.1\r\nHost: localhost\r\nX-a: "
        calls = [self.request(half, read=False, hold_s=3) for _ in range(40)]
        await asyncio.gather(*calls, return_exceptions=True)

    async def slow_body(self) -> None:
        more = ["Content-Type: application/json", "Content-Length: 9"]
        await self.request(_head("POST /v1/videos", *more) + b"{", read=False, hold_s=2)

    async def headers(self) -> None:
        bad = self.draw.choice(["http://[::1", "null", "https://evil.org"])
        await self.request(_head("GET /v1/settings", f"Origin: {bad}"))
        await self.request(self.draw.randbytes(200) + b"\r\n\r\n")

    async def broken(self) -> None:
        async with self.session() as socket:
            for _ in range(30):
                words: list[str | bytes] = [*BROKEN, self.draw.randbytes(20)]
                await socket.send(self.draw.choice(words))

    async def wrong_resume(self) -> None:
        name = self.draw.choice(["0" * 16, "../../etc", HALF, "x" * 64])
        async with self.session(type="resume", session=name, secret=HALF):
            pass

    async def videos(self) -> None:
        told = await self.post({"prompt": "misuse", "seconds": "60", "plan": "live"})
        name = told.partition(b'"id":"')[2].partition(b'"')[0].decode()
        if name:
            await self.request(_head(f"DELETE /v1/videos/{name}"))

    async def unread(self) -> None:
        async with self.session(pace="free", format="png"):
            await asyncio.sleep(3)

    def session(self, **fields: Any) -> _Session:
        return _Session(self.url, self.address, {"type": "open"} | fields)


class _Session:
    """A WebSocket that has sent its first message, and is cut off at its end."""

    def __init__(self, url: str, address: str, first: dict[str, Any]) -> None:
        self.url, self.address, self.first = url, address, first
        self.socket: ClientConnection | None = None

    async def __aenter__(self) -> ClientConnection:
        self.socket = await connect(
            self.url.replace("http", "ws") + "/v1/sessions",
            subprotocols=[Subprotocol(SUBPROTOCOL)], max_size=None, max_queue=4,
            local_addr=(self.address, 0), close_timeout=0.1, ping_interval=None,
        )  # fmt: skip
        try:
            await self.socket.send(json.dumps(self.first))
            await asyncio.wait_for(self.socket.recv(), 10)
        except BaseException:
            await self.__aexit__()
            raise
        return self.socket

    async def __aexit__(self, *given: object) -> None:
        if self.socket is not None:
            self.socket.transport.abort()


def _head(first: str, *lines: str) -> bytes:
    return "\r\n".join([f"{first} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode()


def misuse(
    model: str = "toy-chunks",
    *,
    minutes: float = 1.0,
    seed: int = 0,
    command: str = "",
    on_minute: Callable[[str], None] | None = None,
) -> Document:
    """Serve a model to an honest session and eight misusing clients; one row of measurements."""
    load, seconds = os.getloadavg()[0], 60 * minutes
    most = int(60 * (seconds + ALONE_S + WARM_S)) + 1000
    with server(model, "--plan", "live", "--set", f"session_frames={most}") as (url, pid, log):
        honest, attackers, memory = asyncio.run(_run(url, pid, seconds, seed, on_minute))
        log_bytes = log()
    gaps, alone = _gaps([at for _, at in honest.chunks]), _gaps(honest.alone)
    if len(gaps) < 2 or not alone:
        raise TachyscopeError("the honest session made no chunks in this time: give more minutes")
    numbers = [number for number, _ in honest.chunks]
    half = len(memory) // 2
    done = sum((one.done for one in attackers), Counter())
    row: Document = {
        "model": model,
        "seconds": seconds,
        "attackers": ATTACKERS,
        "seed": seed,
        "attacks": sum(done.values()),
        "of_each": dict(sorted(done.items())),
        "chunks": len(numbers),
        "chunks_lost": numbers[-1] - numbers[0] + 1 - len(numbers),
        "keys": honest.pressed,
        "keys_lost": honest.pressed - honest.applied,
        "pictures": honest.pictures,
        "gap_s_alone": statistics.mean(alone),
        "gap_s_mean": statistics.mean(gaps),
        "gap_s_p99": sorted(gaps)[int(0.99 * (len(gaps) - 1))],
        "gap_s_worst": max(gaps),
        "worst_over_mean": max(gaps) / statistics.mean(gaps),
        "wait_ms_mean": statistics.mean(honest.wait_ms),
        "wait_ms_worst": max(honest.wait_ms),
        "health_s_worst": max(honest.health_s),
        "rss_mb_first_half": max(memory[:half]),
        "rss_mb_second_half": max(memory[half:]),
        "log_bytes": log_bytes,
    }
    return document("misuse", [row], command, warm_seconds=WARM_S, load_before=load)


def _gaps(times: Sequence[float]) -> list[float]:
    return [b - a for a, b in zip(times[:-1], times[1:], strict=True)]


def lines(results: Document) -> Iterator[str]:
    """The results for a reader."""
    (row,) = results["rows"]
    shown = {
        "attacks": f"{row['attacks']} by {row['attackers']} clients",
        "honest session, chunks and lost": f"{row['chunks']} and {row['chunks_lost']}",
        "keys and lost": f"{row['keys']} and {row['keys_lost']}",
        "between chunks, alone": f"{row['gap_s_alone']:.2f} s",
        "between chunks, mean and worst": f"{row['gap_s_mean']:.2f} and {row['gap_s_worst']:.2f} s",
        "worst / mean": f"{row['worst_over_mean']:.2f}",
        "worst answer of /health": f"{row['health_s_worst']:.2f} s",
        "server's memory, most of both halves": "{:.1f} and {:.1f} MB".format(
            row["rss_mb_first_half"], row["rss_mb_second_half"]
        ),
        "server's log": f"{row['log_bytes']} bytes",
    }  # fmt: skip
    yield from format_table(("", ""), list(shown.items()))


async def _run(
    url: str, pid: int, seconds: float, seed: int, on_minute: Callable[[str], None] | None
) -> tuple[Honest, list[Attacker], list[float]]:
    """The honest session, the attackers, and the server's memory sampled every second."""
    begun = time.monotonic() + ALONE_S + WARM_S
    until = begun + seconds
    attackers = [
        Attacker(url, f"127.0.0.{2 + i}", random.Random(1000 * seed + i)) for i in range(ATTACKERS)
    ]
    async with await join(url) as socket:
        await socket.send(json.dumps({"type": "open", "seed": seed}))
        opened = json.loads(await socket.recv())
        if opened["type"] != "opened":
            raise TachyscopeError(f"the server refused a session: {opened['message']}")
        honest, memory = Honest(), list[float]()
        tasks = [
            asyncio.create_task(_read(socket, honest, begun - WARM_S, begun)),
            asyncio.create_task(_health(url, honest, begun)),
        ]
        misusing = [asyncio.create_task(one.run(begun - WARM_S, until)) for one in attackers]
        keys = random.Random(seed)
        while (now := time.monotonic()) < until:
            for task in tasks:
                if task.done():
                    task.result()
                    raise TachyscopeError("the server ended the honest session")
            if now >= begun:
                memory.append(rss_mb(pid))
                if on_minute is not None and len(memory) % 60 == 1:
                    on_minute(f"minute {len(memory) // 60}: {memory[-1]:.1f} MB")
            honest.pressed += 1
            letter = keys.choice(opened["actions"].strip(".") or [""])
            await socket.send(json.dumps({"type": "keys", "id": honest.pressed, "actions": letter}))
            await asyncio.sleep(1.0)
        await asyncio.gather(*misusing)
        end = time.monotonic() + 60
        while honest.applied < honest.pressed and time.monotonic() < end:
            await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return honest, attackers, memory


async def _read(socket: ClientConnection, honest: Honest, misused: float, begun: float) -> None:
    async for message in socket:
        now = time.monotonic()
        if isinstance(message, bytes):
            honest.pictures += Header.read(message)[0].lane == MAIN
            continue
        told = json.loads(message)
        if told["type"] == "chunk" and now < misused:
            honest.alone.append(now)
        elif told["type"] == "chunk" and now >= begun:
            honest.chunks.append((told["chunk"], now))
            honest.wait_ms.append(told["wait_ms"])
        elif told["type"] == "receipt" and told["phase"] == "applied":
            honest.applied += 1
        elif told["type"] in ("error", "closed"):
            raise TachyscopeError(f"the honest session was ended: {told}")


async def _health(url: str, honest: Honest, begun: float) -> None:
    probe = Attacker(url, "127.0.0.1", random.Random(0))
    while True:
        now = time.monotonic()
        try:
            told = await probe.request(_head("GET /health"), wait_s=HEALTH_S)
        except TimeoutError:
            raise TachyscopeError(f"/health gave no answer in {HEALTH_S:g} s") from None
        if not told.startswith(b"HTTP/1.1 200"):
            raise TachyscopeError(f"/health was refused: {told[:80]!r}")
        if now >= begun or not honest.health_s:
            honest.health_s.append(time.monotonic() - now)
        await asyncio.sleep(1.0)
