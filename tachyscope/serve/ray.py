"""Sessions on many machines, by Ray Serve.

The deployment `Sessions` has the model, one replica a GPU. The ingress has the page and the
WebSockets, on any machine of the cluster, and no model. A live session is one streaming call, and
so bound to its replica; what its client sends goes through a mailbox. Snapshots lie on an fsspec
path that all replicas reach: where a replica dies, its clients are told to come back (close code
1012), and another replica goes on.
"""

from __future__ import annotations

import asyncio
import math
import os
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray
import uvicorn
from prometheus_client import CollectorRegistry, Counter
from ray import serve
from ray.exceptions import RayError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from tachyscope import __version__
from tachyscope.errors import TachyscopeError
from tachyscope.models.registry import load
from tachyscope.serve import protocol
from tachyscope.serve.app import ENCODERS, Door, accept, describe, page_routes
from tachyscope.serve.connection import Connection
from tachyscope.serve.engine import SNAPSHOT_CHUNKS, Engine
from tachyscope.serve.limits import Limits
from tachyscope.serve.mailbox import Mailbox
from tachyscope.serve.metrics import Metrics
from tachyscope.serve.security import Guard
from tachyscope.serve.server import Place, address, default_budget, listen, uvicorn_config
from tachyscope.serve.snapshots import Snapshots

RESTART = 1012  # the close code of a client that should come back at once
FULL = 0.8  # share of the replicas' memory above which there should be more of them
MOVING_S = 3.0  # for a session's last replica to write it


@dataclass(frozen=True)
class Settings:
    """What all replicas share."""

    model: str
    state: str  # a path or fsspec URL that all of them reach
    plan: str = "fast"
    weights: str | None = None
    device: str = "cpu"
    dtype: str = "float32"
    budget: int | None = None
    snapshot_chunks: int = SNAPSHOT_CHUNKS
    limits: Limits = Limits()


class RemoteSocket:
    """A replica's end of a WebSocket: reads a mailbox, and queues what is to be sent."""

    def __init__(self, mailbox: Any, key: str) -> None:
        self._mailbox, self._key = mailbox, key
        # one at a time: a slow client is felt here, and its frames are dropped here
        self.out: asyncio.Queue[str | bytes | tuple[int, str | None]] = asyncio.Queue(1)

    async def receive(self) -> Any:
        return await self._mailbox.get.remote(self._key)

    async def send_text(self, data: str) -> None:
        await self.out.put(data)

    async def send_bytes(self, data: bytes) -> None:
        await self.out.put(data)

    async def close(self, code: int, reason: str | None) -> None:
        await self.out.put((code, reason))


class Sessions:
    """A replica: the model, and the sessions that are bound to it."""

    def __init__(self, settings: Settings) -> None:
        model = load(settings.model, settings.weights, device=settings.device, dtype=settings.dtype)
        budget = settings.budget
        self.engine = Engine(
            model,
            settings.model,
            Snapshots(settings.state),
            plan=settings.plan,
            budget=default_budget(model, settings.plan) if budget is None else budget,
            limits=settings.limits,
            metrics=Metrics(),
            snapshot_chunks=settings.snapshot_chunks,
        )
        self._pool = ThreadPoolExecutor(ENCODERS, "tachyscope-encoder")
        self.engine.start()

    async def play(self, mailbox: Any, key: str, resumed: str) -> AsyncIterator[Any]:
        """All that one client's session sends, until it ends; `resumed` is a session's name."""
        await self._wait_for(resumed)
        socket = RemoteSocket(mailbox, key)
        running = asyncio.create_task(Connection(socket, self.engine, self._pool).run())
        coming = asyncio.create_task(socket.out.get())
        try:
            while True:
                await asyncio.wait({coming, running}, return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    return
                yield coming.result()
                coming = asyncio.create_task(socket.out.get())
        finally:
            coming.cancel()
            running.cancel()
            self.engine.call(self.engine.let_go)

    async def _wait_for(self, session: str) -> None:
        """A session that was elsewhere until now may still be being written."""
        snapshots = self.engine.keeper.snapshots
        for _ in range(int(10 * MOVING_S)):
            if not session or session in self.engine.room.sessions or snapshots.has(session):
                return
            await asyncio.sleep(0.1)

    def whereabouts(self) -> dict[str, Any]:
        """The replica's process and its sessions."""
        return {"pid": os.getpid(), "sessions": list(self.engine.room.sessions)}

    def metrics(self) -> bytes:
        self.engine.count()
        return self.engine.metrics.text()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What `scale_by_bytes` decides by."""
        reserved = sum(one.bytes for one in self.engine.room.resident)
        return {"reserved_share": reserved / max(1, self.engine.room.budget)}

    def __del__(self) -> None:
        """The replica is drained: what is still open is saved."""
        engine = getattr(self, "engine", None)
        if engine is not None:
            engine.stop()


def replicas_for(shares: list[float], fewest: int, most: int) -> int:
    """How many replicas hold what is reserved, at `FULL` of the memory of each."""
    return max(fewest, min(most, math.ceil(sum(shares) / FULL - 1e-9)))


def scale_by_bytes(context: Any) -> tuple[int, dict[str, Any]]:
    """Ray's autoscaling policy: by reserved bytes, not by requests."""
    found = context.raw_metrics.get("reserved_share", {})
    shares = [values[-1].value for values in found.values() if values]
    least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return replicas_for(shares, least, most), {}


def deploy(settings: Settings, fewest: int, most: int, gpus: float = 0) -> Any:
    """The sessions' deployment, started on the cluster; the handle to its replicas."""
    more: dict[str, Any] = {"num_replicas": fewest}
    if most > fewest:
        policy = {"policy_function": scale_by_bytes}
        more = {
            "autoscaling_config": {"min_replicas": fewest, "max_replicas": most, "policy": policy}
        }
    sessions = serve.deployment(
        name="Sessions",
        max_ongoing_requests=2 * settings.limits.sessions,  # and calls that are no sessions
        graceful_shutdown_timeout_s=10,
        ray_actor_options={"num_gpus": gpus, "num_cpus": 1},
        **more,
    )(Sessions)
    serve.start(proxy_location="Disabled")  # the ingress is ours
    return serve.run(sessions.bind(settings), name="tachyscope", route_prefix=None)


class Ingress:
    """The page and the WebSockets of a cluster, in the process that runs it."""

    def __init__(self, settings: Settings, handle: Any) -> None:
        self._settings, self._handle = settings, handle
        self._mailbox: Any = ray.remote(num_cpus=0)(Mailbox).remote()

    def app(self, guard: Guard) -> Starlette:
        refused = Counter(
            "tachyscope_refused", "Requests refused.", ["why"], registry=CollectorRegistry()
        )
        return Starlette(
            routes=[
                *page_routes(),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/v1/settings", self._describe),
                WebSocketRoute("/v1/sessions", self._play),
            ],
            middleware=[Middleware(Door, guard=guard, refused=refused)],
        )

    async def _health(self, request: Request) -> Response:
        model = self._settings.model
        return JSONResponse({"status": "ok", "version": __version__, "model": model})

    async def _metrics(self, request: Request) -> Response:
        """Of one replica, whichever answers."""
        return Response(await self._handle.metrics.remote(), media_type="text/plain")

    async def _describe(self, request: Request) -> Response:
        found = self._settings
        return JSONResponse(describe(found.model, found.plan, found.limits))

    async def _play(self, socket: WebSocket) -> None:
        if not await accept(socket):
            return
        key, first = uuid.uuid4().hex, await socket.receive()
        await self._mailbox.put.remote(key, first)
        stream = self._handle.options(stream=True).play.remote(
            self._mailbox, key, _resumed(first.get("text") or "")
        )
        reading = asyncio.create_task(self._forward(socket, key))
        try:
            async for item in stream:
                if isinstance(item, str):
                    await socket.send_text(item)
                elif isinstance(item, bytes):
                    await socket.send_bytes(item)
                else:
                    await socket.close(*item)
        except RayError:
            await socket.close(RESTART, "the session's machine is gone: resume")
        finally:
            reading.cancel()
            await self._mailbox.put.remote(key, {"type": "websocket.disconnect"})

    async def _forward(self, socket: WebSocket, key: str) -> None:
        event: Any = {"type": ""}
        while event["type"] != "websocket.disconnect":
            event = await socket.receive()
            await self._mailbox.put.remote(key, event)


def _resumed(text: str) -> str:
    """The session that a first message asks for; empty where it asks for none."""
    try:
        return str(protocol.read_json(text).get("session", ""))
    except TachyscopeError:
        return ""


def run(settings: Settings, place: Place, replicas: int) -> None:
    """Serve by so many replicas until a signal comes; joins a cluster, or starts one here."""
    ray.init(address=os.environ.get("RAY_ADDRESS"), include_dashboard=False, log_to_driver=False)
    try:
        gpus = 1 if settings.device.startswith("cuda") else 0
        handle = deploy(settings, replicas, replicas, gpus)
        with listen(place) as listener:
            app = Ingress(settings, handle).app(place.guard)
            url = address(place, listener)
            print(f"{settings.model} by {replicas} replicas: {url} (Ctrl-C ends it)", flush=True)
            uvicorn.Server(uvicorn_config(app, settings.limits)).run([listener])
    finally:
        serve.shutdown()
        ray.shutdown()
