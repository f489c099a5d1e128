"""The middleware before all routes: authorization, size and time limits of bodies, headers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import Any

from prometheus_client import Counter
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from tachyscope.serve.http_errors import HEADERS, error
from tachyscope.serve.limits import Limits
from tachyscope.serve.security import Guard

CLOSE = {"connection": "close"}  # what is left of a refused body is not read


class Admission:
    """Refuses requests by the guard, limits bodies, and sets security headers on every answer."""

    def __init__(
        self,
        app: ASGIApp,
        guard: Guard,
        limits: Limits,
        refused: Counter,
        open_paths: Collection[str],
    ) -> None:
        """`open_paths` need no token."""
        self.app, self.guard, self.limits, self.refused = app, guard, limits, refused
        self.open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        socket = scope["type"] == "websocket"
        request = WebSocket(scope, receive, send) if socket else Request(scope)
        refused = self.guard.refusal(request.headers, scope.get("subprotocols", ()))
        if refused and refused[0] == 401 and scope["path"] in self.open_paths:
            refused = None
        scope["owner"] = self.guard.owner(request.headers, scope.get("subprotocols", ()))
        more: dict[str, str] = {}
        if refused is None and not socket and (refused := self._too_large(request.headers)):
            more = CLOSE

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                pairs = [(key.encode(), value.encode()) for key, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *pairs]
            await send(message)

        if refused:
            self.refused.labels(f"status_{refused[0]}").inc()
            answer = error(refused[0], refused[1], **more)
            if isinstance(request, WebSocket):
                answer.headers.update(HEADERS)
                await request.receive()
                await request.send_denial_response(answer)
            else:
                await answer(scope, receive, with_headers)
        elif socket:
            await self.app(scope, receive, send)
        else:
            await self.app(scope, self._bounded(receive), with_headers)

    def _too_large(self, headers: Headers) -> tuple[int, str] | None:
        """The refusal of a body by its headers, or None."""
        if "transfer-encoding" in headers:  # also beside a length, which would then mean nothing
            return 411, "a body is sent with its length (Content-Length), not in chunks"
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > self.limits.message_bytes:
            return 413, f"a body has at most {self.limits.message_bytes} bytes, got {length[:20]}"
        return None

    def _bounded(self, receive: Receive) -> Receive:
        """`receive` with limits on a body's bytes and time, whatever its headers say."""
        read, whole, until = 0, False, time.monotonic() + self.limits.request_s

        async def bounded() -> Message:
            nonlocal read, whole
            if whole:  # what follows is that the client left
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), until - time.monotonic())
            except TimeoutError:
                raise self._cut(
                    408, f"a request comes within {self.limits.request_s:g} s"
                ) from None
            read += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if read > self.limits.message_bytes:
                raise self._cut(413, f"a body has at most {self.limits.message_bytes} bytes")
            return message

        return bounded

    def _cut(self, status: int, words: str) -> HTTPException:
        self.refused.labels(f"status_{status}").inc()
        return HTTPException(status, words, CLOSE)
