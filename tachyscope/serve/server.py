"""Loads a model, makes the engine and the application, and runs them by uvicorn."""

from __future__ import annotations

import socket
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.applications import Starlette

from tachyscope.core.errors import TachyscopeError
from tachyscope.models.base import VideoModel
from tachyscope.serve.app import make_app
from tachyscope.serve.engine import SNAPSHOT_CHUNKS, make_engine
from tachyscope.serve.http import WebSocketProtocol, calm_logs, protocol_class
from tachyscope.serve.limits import Limits
from tachyscope.serve.scratch import Scratch
from tachyscope.serve.security import LOCAL, Guard
from tachyscope.serve.snapshots import Snapshots

BACKLOG = 128  # connections taken at once: far below a usual limit of open files
PING_S = 20.0  # a client that answers no ping for so long is gone


@dataclass(frozen=True)
class Place:
    """Where a server listens, and whom it lets in."""

    host: str = "127.0.0.1"
    port: int = 8080
    tokens: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.host not in LOCAL and not self.tokens:
            raise TachyscopeError(
                f"who reaches {self.host} could use this machine: give --token-file, or listen on "
                f"127.0.0.1"
            )

    @property
    def guard(self) -> Guard:
        # here by no other name: a site's own name may be made to lead here
        return Guard(self.tokens, self.origins, LOCAL if self.host in LOCAL else ())


@contextmanager
def kept_in(state: str | None) -> Iterator[Snapshots]:
    """Snapshots in a folder or URL that stays, or in one that goes when the server does."""
    if state is not None:
        snapshots = Snapshots(state)
        snapshots.check_writable()  # now, and not at the first session's snapshot
        yield snapshots
        return
    scratch = Scratch()
    try:
        yield Snapshots(str(scratch.path))
    finally:
        scratch.remove()


def run(
    model: VideoModel,
    name: str,
    *,
    plan: str,
    place: Place,
    limits: Limits,
    state: str | None = None,
    budget: int | None = None,
    snapshot_chunks: int = SNAPSHOT_CHUNKS,
    open_page: bool = False,
) -> None:
    """Serve until a signal comes."""
    listener = listen(place)
    with kept_in(state) as snapshots, listener:
        engine = make_engine(model, name, snapshots, plan, limits, budget, snapshot_chunks)
        url = address(place, listener)
        print(f"{name} by plan {plan}: {url} (Ctrl-C ends it)", flush=True)
        if open_page:
            threading.Timer(0.5, webbrowser.open, [url]).start()
        app = make_app(engine, place.guard)
        uvicorn.Server(uvicorn_config(app, limits)).run([listener])


def uvicorn_config(app: Starlette, limits: Limits, **changes: Any) -> uvicorn.Config:
    """How a server of ours is run."""
    calm_logs()
    options: dict[str, Any] = {
        "http": protocol_class(limits),
        "ws": WebSocketProtocol,
        "log_level": "warning",
        "backlog": BACKLOG,
        # beyond what `Connections` admits, which makes room where it is full
        "limit_concurrency": limits.connections + 1,
        "ws_max_size": limits.log_bytes,
        # pictures get no smaller by it, at 2 ms of the event loop for one of 480x832
        "ws_per_message_deflate": False,
        "ws_ping_interval": PING_S,
        "ws_ping_timeout": PING_S,
        "timeout_graceful_shutdown": 10,
        "server_header": False,
    }
    return uvicorn.Config(app, **options | changes)


def address(place: Place, listener: socket.socket) -> str:
    """Where a browser finds it."""
    host = "localhost" if place.host in LOCAL else place.host
    return f"http://{host}:{listener.getsockname()[1]}/"


def listen(place: Place) -> socket.socket:
    """A socket at that place; raises where it is taken."""
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((place.host, place.port))
    except OSError as fault:
        listener.close()
        reason = (fault.strerror or str(fault)).lower()
        raise TachyscopeError(
            f"{place.host}:{place.port} cannot be listened on ({reason}): choose another `port`"
        ) from fault
    return listener
