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
from tachyscope.serve.http import WebSocketProtocol, limit_logs, protocol_class
from tachyscope.serve.limits import Limits
from tachyscope.serve.scratch import Scratch
from tachyscope.serve.security import LOCAL, Guard
from tachyscope.serve.snapshots import Snapshots

BACKLOG = 128  # connections taken at once: far below a usual limit of open files
PING_S = 20.0  # a client that answers no ping for so long is gone


@dataclass(frozen=True)
class Endpoint:
    """Where a server listens, and which clients it accepts."""

    host: str = "127.0.0.1"
    port: int = 8080
    tokens: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.host not in LOCAL and not self.tokens:
            raise TachyscopeError(
                f"everybody who reaches {self.host} could use this server: give --token-file, or "
                f"listen on 127.0.0.1"
            )

    @property
    def guard(self) -> Guard:
        # here by no other name: a site's own name may be made to lead here
        return Guard(self.tokens, self.origins, LOCAL if self.host in LOCAL else ())


@contextmanager
def open_snapshots(state: str | None) -> Iterator[Snapshots]:
    """The snapshots of a folder or URL, or of a temporary folder if `state` is None."""
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
    endpoint: Endpoint,
    limits: Limits,
    state: str | None = None,
    budget: int | None = None,
    snapshot_chunks: int = SNAPSHOT_CHUNKS,
    open_page: bool = False,
) -> None:
    """Serve until a signal comes."""
    listener = listen(endpoint)
    with open_snapshots(state) as snapshots, listener:
        engine = make_engine(model, name, snapshots, plan, limits, budget, snapshot_chunks)
        url = address(endpoint, listener)
        print(f"{name} by plan {plan}: {url} (Ctrl-C ends it)", flush=True)
        if open_page:
            threading.Timer(0.5, webbrowser.open, [url]).start()
        app = make_app(engine, endpoint.guard)
        uvicorn.Server(uvicorn_config(app, limits)).run([listener])


def uvicorn_config(app: Starlette, limits: Limits, **changes: Any) -> uvicorn.Config:
    """uvicorn's configuration for a server with these limits."""
    limit_logs()
    options: dict[str, Any] = {
        "http": protocol_class(limits),
        "ws": WebSocketProtocol,
        "log_level": "warning",
        "backlog": BACKLOG,
        # one more than `Connections` admits, which cuts a silent one at its limit
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


def address(endpoint: Endpoint, listener: socket.socket) -> str:
    """The server's address for a browser."""
    host = "localhost" if endpoint.host in LOCAL else endpoint.host
    return f"http://{host}:{listener.getsockname()[1]}/"


def listen(endpoint: Endpoint) -> socket.socket:
    """A socket that is bound to this endpoint; raises if the port is taken."""
    family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((endpoint.host, endpoint.port))
    except OSError as fault:
        listener.close()
        reason = (fault.strerror or str(fault)).lower()
        raise TachyscopeError(
            f"{endpoint.host}:{endpoint.port} cannot be listened on ({reason}): choose another "
            f"`port`"
        ) from fault
    return listener
