"""The server: routes, who is let in, and what they get."""

from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import Counter
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from tachyscope import __version__
from tachyscope.models.registry import MODELS
from tachyscope.plan import NAMES
from tachyscope.serve.connection import Connection
from tachyscope.serve.engine import Engine
from tachyscope.serve.jobs import Jobs
from tachyscope.serve.limits import Limits
from tachyscope.serve.protocol import SUBPROTOCOL
from tachyscope.serve.security import Guard
from tachyscope.serve.videos import LocalVideos, error, video_routes

PAGE = Path(__file__).parent / "page"
FILES = {"/": "index.html", "/page.css": "page.css", "/page.js": "page.js"}
ENCODERS = 2  # threads
# the page loads nothing from anywhere else, and no other site may frame it
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
NO_RECORDING = "no session of this name and secret has a recording: send record on, then off"
OPEN_PATHS = {"/health", *FILES}  # for everybody who reaches the host


async def accept(socket: WebSocket) -> bool:
    """Accept a client that speaks our version of the protocol, and no other."""
    if SUBPROTOCOL not in socket.scope["subprotocols"]:
        await socket.receive()
        await socket.send_denial_response(
            error(400, f"this server speaks the WebSocket subprotocol {SUBPROTOCOL}")
        )
        return False
    await socket.accept(SUBPROTOCOL)
    return True


class Door:
    """Asks the guard before anything else, and sets headers on every answer."""

    def __init__(self, app: ASGIApp, guard: Guard, refused: Counter) -> None:
        self.app, self.guard, self.refused = app, guard, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        socket = scope["type"] == "websocket"
        request = WebSocket(scope, receive, send) if socket else Request(scope)
        refused = self.guard.refusal(request.headers, scope.get("subprotocols", ()))
        if refused and refused[0] == 401 and scope["path"] in OPEN_PATHS:
            refused = None
        if refused:
            self.refused.labels(f"status_{refused[0]}").inc()
            answer = error(*refused)
            if isinstance(request, WebSocket):
                await request.receive()
                await request.send_denial_response(answer)
            else:
                await answer(scope, receive, send)
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                pairs = [(key.encode(), value.encode()) for key, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *pairs]
            await send(message)

        await self.app(scope, receive, send if socket else with_headers)


def describe(model: str, plan: str, limits: Limits) -> dict[str, Any]:
    """What the page must know before it opens a session."""
    return {
        "model": model,
        "plan": plan,
        "plans": list(NAMES),
        "worlds": bool(MODELS[model].world),
        "prompt_letters": limits.prompt_letters,
        "log_bytes": limits.log_bytes,
    }


def page_routes() -> list[Route]:
    """The page's files."""

    async def page(request: Request, name: str) -> Response:
        return FileResponse(PAGE / name)

    return [Route(path, partial(page, name=name)) for path, name in FILES.items()]


def make_app(engine: Engine, guard: Guard) -> Starlette:
    """The application around an engine, which it starts and stops."""
    pool = ThreadPoolExecutor(ENCODERS, "tachyscope-encoder")
    jobs = Jobs(engine)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        engine.start()
        yield
        jobs.stop()
        await run_in_threadpool(engine.stop)
        pool.shutdown()

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok", "version": __version__, "model": engine.name})

    async def metrics(request: Request) -> Response:
        engine.count()
        jobs.count()
        return Response(engine.metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(request: Request) -> Response:
        return JSONResponse(
            {
                "object": "list",
                "data": [{"id": engine.name, "object": "model", "owned_by": "tachyscope"}],
            }
        )

    async def settings(request: Request) -> Response:
        return JSONResponse(describe(engine.name, engine.plan, engine.limits))

    async def sessions(socket: WebSocket) -> None:
        if await accept(socket):
            await Connection(socket, engine, pool).run()
        else:
            engine.metrics.refused.labels("version").inc()

    async def recording(request: Request) -> Response:
        """A session's finished mp4, for who has its secret."""
        path = engine.finished(
            request.path_params["name"], request.headers.get("x-session-secret", "")
        )
        if path is None:
            return error(404, NO_RECORDING)
        return FileResponse(path, media_type="video/mp4")

    return Starlette(
        routes=[
            *page_routes(),
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/v1/models", models),
            Route("/v1/settings", settings),
            Route("/v1/sessions/{name}/recording", recording),
            *video_routes(LocalVideos(jobs), engine.limits, engine.metrics.refused),
            WebSocketRoute("/v1/sessions", sessions),
        ],
        middleware=[Middleware(Door, guard=guard, refused=engine.metrics.refused)],
        lifespan=lifespan,
    )
