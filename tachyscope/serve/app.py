"""The ASGI application: its routes and their settings."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
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
from starlette.websockets import WebSocket

from tachyscope import __version__
from tachyscope.core.plan import NAMES
from tachyscope.models.atrium.prompts import WORDS
from tachyscope.models.atrium.world import EYE, HEIGHT, SLOPE
from tachyscope.models.registry import MODELS
from tachyscope.serve.admission import Admission
from tachyscope.serve.connection import Connection
from tachyscope.serve.engine import Engine
from tachyscope.serve.http_errors import HANDLERS, error
from tachyscope.serve.jobs import Jobs
from tachyscope.serve.lane import can_look
from tachyscope.serve.limits import Limits
from tachyscope.serve.protocol import SUBPROTOCOL
from tachyscope.serve.security import Guard
from tachyscope.serve.videos import LocalVideos, video_routes

PAGE = Path(__file__).parent / "page"
FILES = {"/": "index.html"} | {f"/{path.name}": path.name for path in PAGE.glob("*.[cj]s*")}
ENCODERS = 2  # threads
DEFAULT_PLAN = "fast"  # of the command line
# how a camera sees its room of 1 by 1: half the field of view's tangent, and heights
ROOM = {"slope": SLOPE, "height": HEIGHT, "eye": EYE}
NO_RECORDING = "no session of this name and secret has a recording: send record on, then off"
OPEN_PATHS = {"/health", *FILES}  # no token is needed


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


def admission(guard: Guard, limits: Limits, refused: Counter) -> Middleware:
    """The middleware that every request passes first."""
    return Middleware(Admission, guard=guard, limits=limits, refused=refused, open_paths=OPEN_PATHS)


def describe(
    model: str, plan: str, limits: Limits, size: Sequence[int] | None = None
) -> dict[str, Any]:
    """The page's settings; `size` is [height, width] of its pictures, if known."""
    look = can_look(model)
    return {
        "model": model,
        "plan": plan,
        # by the camera's poses, the past that matters is found best
        "page_plan": "pose" if look and plan == DEFAULT_PLAN else plan,
        "plans": list(NAMES),
        "size": size,
        "worlds": bool(MODELS[model].world),
        "random": MODELS[model].random,
        "look": look,
        "room": ROOM if look else None,
        "words": list(WORDS) if MODELS[model].world else None,
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
    encoders = ThreadPoolExecutor(ENCODERS, "tachyscope-encoder")
    jobs = Jobs(engine)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        engine.start()
        yield
        jobs.stop()
        await run_in_threadpool(engine.stop)
        encoders.shutdown()

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
        return JSONResponse(describe(engine.name, engine.plan, engine.limits, engine.model.size))

    async def sessions(socket: WebSocket) -> None:
        if await accept(socket):
            await Connection(socket, engine, encoders).run()
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
            *video_routes(LocalVideos(jobs), engine.metrics.refused),
            WebSocketRoute("/v1/sessions", sessions),
        ],
        middleware=[admission(guard, engine.limits, engine.metrics.refused)],
        exception_handlers=HANDLERS,
        lifespan=lifespan,
    )
