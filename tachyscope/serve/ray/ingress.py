"""The page, the WebSockets and the videos of a cluster, in the process that runs it: no model."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import ray
import uvicorn
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client import Counter as CounterMetric
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from tachyscope import __version__
from tachyscope.core.errors import TachyscopeError
from tachyscope.serve import protocol
from tachyscope.serve.app import NO_RECORDING, accept, admission, describe, page_routes
from tachyscope.serve.connection import HELLO_S, POLICY
from tachyscope.serve.http_errors import HANDLERS, error
from tachyscope.serve.ray.mailbox import GONE, Mailbox
from tachyscope.serve.ray.placement import most_free
from tachyscope.serve.ray.sessions import Settings, deploy
from tachyscope.serve.ray.videos import RayVideos
from tachyscope.serve.security import Guard
from tachyscope.serve.server import Endpoint, address, listen, uvicorn_config
from tachyscope.serve.videos import video_routes

RESTART = 1012  # the close code of a client that should come back at once
LOOK_S = 1.0  # between two looks at which replicas run
ANSWER_S = 10.0  # for all replicas to answer


@dataclass(eq=False)
class Player:
    """A client's connection, and the replica that plays with it."""

    key: str
    sent_to: str = ""  # the replica that was chosen for it, until it is open
    replica: str = ""  # once it has answered
    moving: bool = False  # to another replica


class Ingress:
    """A cluster's clients. Sessions of a replica that Ray stops are moved to others."""

    def __init__(self, settings: Settings, handle: Any) -> None:
        self._settings, self._handle = settings, handle
        self._mailbox: Any = ray.remote(num_cpus=0)(Mailbox).remote()
        self._players: set[Player] = set()
        self._registry = CollectorRegistry()

    def app(self, guard: Guard) -> Starlette:
        settings = self._settings
        refused = CounterMetric(
            "tachyscope_refused", "Requests refused.", ["why"], registry=self._registry
        )
        videos = RayVideos(settings.state, self._handle, settings.limits)
        return Starlette(
            routes=[
                *page_routes(),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._models),
                Route("/v1/settings", self._describe),
                Route("/v1/sessions/{name}/recording", self._recording),
                *video_routes(videos, refused),
                WebSocketRoute("/v1/sessions", self._play),
            ],
            middleware=[admission(guard, settings.limits, refused)],
            exception_handlers=HANDLERS,
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        watching = asyncio.create_task(self._watch())
        yield
        watching.cancel()

    async def _ask(self, method: str, *given: Any) -> list[Any]:
        """The answers of all running replicas; those that fail are left out."""
        response = self._handle.broadcast(method, *given)
        results = await response.results_async(timeout_s=ANSWER_S, return_exceptions=True)
        return [one for one in results if not isinstance(one, Exception)]

    async def _watch(self) -> None:
        """Move the sessions of replicas that do not run any more: Ray waits for them to go."""
        before: set[str] = set()
        while True:
            await asyncio.sleep(LOOK_S)
            if not self._players:
                continue
            try:
                running = {one["replica"] for one in await self._ask("whereabouts")}
            except (RayError, RayServeException, TimeoutError):
                continue
            stopped = {one.replica for one in self._players if one.replica} - running
            for player in list(self._players):
                if player.replica in stopped & before and not player.moving:
                    player.moving = True
                    await self._mailbox.put.remote(player.key, GONE)
            before = stopped

    async def _health(self, request: Request) -> Response:
        model = self._settings.model
        return JSONResponse({"status": "ok", "version": __version__, "model": model})

    async def _metrics(self, request: Request) -> Response:
        """Of all replicas, and of this process, by the label `replica`."""
        texts = dict(await self._ask("metrics")) | {"ingress": generate_latest(self._registry)}
        return Response(merge_metrics(texts), media_type="text/plain; version=0.0.4")

    async def _models(self, request: Request) -> Response:
        one = {"id": self._settings.model, "object": "model", "owned_by": "tachyscope"}
        return JSONResponse({"object": "list", "data": [one]})

    async def _describe(self, request: Request) -> Response:
        settings = self._settings
        return JSONResponse(describe(settings.model, settings.plan, settings.limits))

    async def _recording(self, request: Request) -> Response:
        secret = request.headers.get("x-session-secret", "")
        for data in await self._ask("recording", request.path_params["name"], secret):
            if data is not None:
                return Response(data, media_type="video/mp4")
        return error(404, NO_RECORDING)

    async def _play(self, socket: WebSocket) -> None:
        if not await accept(socket):
            return
        try:
            first = await asyncio.wait_for(socket.receive(), HELLO_S)
        except TimeoutError:
            await socket.close(POLICY, f"nothing was heard for {HELLO_S:g} s")
            return
        player = Player(uuid.uuid4().hex)
        await self._mailbox.open.remote(player.key, first)
        await self._place(player)
        stream = self._handle.options(stream=True).play.remote(
            self._mailbox, player.key, _resumed(first.get("text") or ""), replica=player.sent_to
        )
        reading = asyncio.create_task(self._forward(socket, player.key))
        try:
            async for item in stream:
                if isinstance(item, str):
                    player.sent_to = ""
                    await socket.send_text(item)
                elif isinstance(item, bytes):
                    await socket.send_bytes(item)
                elif isinstance(item, dict):
                    player.replica = item["replica"]
                else:
                    await socket.close(*item)
            if player.moving:  # it has been written
                await socket.close(RESTART, "the session's machine stops: resume")
        except RayError:
            await self._mailbox.drop.remote(player.key)
            await socket.close(RESTART, "the session's machine is gone: resume")
        finally:
            self._players.discard(player)
            reading.cancel()
            await self._mailbox.put.remote(player.key, GONE)

    async def _place(self, player: Player) -> None:
        """Choose the replica with the most free bytes; Ray's own rule if none answers."""
        try:
            replicas = await self._ask("whereabouts")
        except (RayError, RayServeException, TimeoutError):
            replicas = []
        coming = Counter(one.sent_to for one in self._players)
        player.sent_to = most_free(replicas, coming)
        self._players.add(player)

    async def _forward(self, socket: WebSocket, key: str) -> None:
        event: Any = {"type": ""}
        while event["type"] != GONE["type"]:
            event = await socket.receive()
            await self._mailbox.put.remote(key, event)


def _resumed(text: str) -> str:
    """The session that a first message asks for; empty where it asks for none."""
    try:
        return str(protocol.read_json(text).get("session", ""))
    except TachyscopeError:
        return ""


class _Merged:
    """A collector of metrics that other processes counted."""

    def __init__(self, families: Mapping[str, Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families.values()


def merge_metrics(texts: Mapping[str, bytes]) -> bytes:
    """Merge /metrics of replicas; the label `replica` names each one."""
    families: dict[str, Metric] = {}
    for replica, text in texts.items():
        for one in text_string_to_metric_families(text.decode()):
            family = families.setdefault(one.name, Metric(one.name, one.documentation, one.type))
            family.samples += [
                sample._replace(labels=sample.labels | {"replica": replica})
                for sample in one.samples
            ]
    registry = CollectorRegistry()
    registry.register(_Merged(families))
    return generate_latest(registry)


def run(settings: Settings, endpoint: Endpoint, fewest: int, most: int) -> None:
    """Serve by `fewest` to `most` replicas until a signal comes; joins a cluster or starts one.

    On a cluster that was there before, the replicas stay, and keep their sessions on disk where
    this process is killed: the next command replaces them one by one.
    """
    cluster, on_signal = os.environ.get("RAY_ADDRESS"), signal.getsignal(signal.SIGTERM)
    # Ray's own niceness of 15 would starve replicas beside anything else
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(address=cluster, include_dashboard=False, log_to_driver=False)
    signal.signal(signal.SIGTERM, on_signal)  # Ray has put its own there
    try:
        gpus = 1 if settings.device.startswith("cuda") else 0
        handle = deploy(settings, fewest, most, gpus)
        with listen(endpoint) as listener:
            app = Ingress(settings, handle).app(endpoint.guard)
            url = address(endpoint, listener)
            count = f"{fewest} to {most}" if most > fewest else str(fewest)
            print(f"{settings.model} by {count} replicas: {url} (Ctrl-C ends it)", flush=True)
            uvicorn.Server(uvicorn_config(app, settings.limits)).run([listener])
    finally:
        if cluster is None:
            serve.shutdown()
        ray.shutdown()
