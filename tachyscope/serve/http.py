"""uvicorn's protocols with the limits that they lack: connections, slow heads, unread answers."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from tachyscope.serve.limits import Limits

# what is read and dropped of a client after a message that cannot be taken
DRAIN_BYTES = 2**24
DRAIN_S = 2.0


class Connections:
    """The open connections of a server, WebSockets included."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._open: list[HttpProtocol] = []  # oldest first

    def admit(self, new: HttpProtocol) -> bool:
        """Whether one more connection may open; at a limit the oldest silent one is cut for it.

        A closed connection counts until its client has read what it was sent.
        """
        limits = self.limits
        self._open = [one for one in self._open if not one.gone]
        same = [one for one in self._open if one.address == new.address]
        for most, open_ in (
            (limits.connections_per_address, same),
            (limits.connections, self._open),
        ):
            if len(open_) < most:
                continue
            silent = next((one for one in open_ if one.silent), None)
            if silent is None:
                return False
            silent.transport.abort()
            self._open.remove(silent)
        self._open.append(new)
        return True


class HttpProtocol(H11Protocol):
    """A connection that is cut if a request's head comes, or an answer is read, too slowly."""

    connections_: Connections  # of the server

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._late: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._lost = self._upgraded = False
        if self.connections_.admit(self):
            self._watch()
        else:
            transport.abort()

    @property
    def silent(self) -> bool:
        """Whether it waits for a request's head, or is closing."""
        return self._late is not None or self.transport.is_closing()

    @property
    def gone(self) -> bool:
        """Whether it is closed; of a WebSocket, whether its protocol is closing it."""
        return self._lost or (self._upgraded and self.transport.is_closing())

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._unwatch()
        self._read_on()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the time limit of a client that does not read."""
        super().pause_writing()
        wait = self.connections_.limits.send_s
        self._unread = self._unread or self.loop.call_later(wait, self.transport.abort)

    def resume_writing(self) -> None:
        self._read_on()
        super().resume_writing()

    def _read_on(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._upgraded = True
        self._unwatch()
        self._read_on()
        super().handle_websocket_upgrade(event)
        handshake: Any = self.transport.get_protocol()
        if handshake.conn.handshake_exc is not None:  # which uvicorn never answers, nor closes
            self.send_400_response(
                "this opening of a WebSocket cannot be read: send fewer headers, no body"
            )

    def _watch(self) -> None:
        """Run the time limit of a request's head: until it begins, and until it is whole."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._unwatch()
        elif self._late is None:
            wait = self.connections_.limits.request_s
            self._late = self.loop.call_later(wait, self.transport.abort)

    def _unwatch(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """A WebSocket whose client can read why it is closed while it still sends.

    A socket that is closed with unread data resets the connection, and the client then sees 1006 in
    place of the close frame's code. So the close frame is followed by the end of what this side
    sends, and what the client sends is dropped until it closes too, within the bounds above.
    """

    _drained: int | None = None  # bytes, once the close frame is sent

    def data_received(self, data: bytes) -> None:
        if self._drained is None:
            super().data_received(data)
            return
        self._drained += len(data)
        if self._drained > DRAIN_BYTES:
            self.transport.abort()

    def handle_parser_exception(self) -> None:
        close = self.conn.close_sent
        assert close is not None
        self.queue.put_nowait(
            {"type": "websocket.disconnect", "code": close.code, "reason": close.reason}
        )
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.transport.write_eof()
        self.close_sent, self._drained = True, 0
        self.transport.resume_reading()  # which waits while a message before is in the queue
        self.close_timer = self.loop.call_later(DRAIN_S, self.transport.abort)


def protocol_class(limits: Limits) -> type[asyncio.Protocol]:
    """uvicorn's `http` class for a server with these limits."""
    return type("LimitedHttp", (HttpProtocol,), {"connections_": Connections(limits)})


class RateLimitFilter(logging.Filter):
    """Passes `most` records a minute, and counts the others in the next minute's first."""

    def __init__(self, most: int = 60) -> None:
        super().__init__()
        self.most, self._since, self._count = most, time.monotonic(), 0

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now - self._since > 60:
            if self._count > self.most:
                held = self._count - self.most
                record.msg, record.args = f"{record.getMessage()} ({held} more were held back)", ()
            self._since, self._count = now, 0
        self._count += 1
        return self._count <= self.most


def limit_logs() -> None:
    """Keep clients from filling a disk through the log."""
    for name in ("uvicorn.error", "asyncio", "tachyscope.serve"):
        logger = logging.getLogger(name)
        if not any(isinstance(one, RateLimitFilter) for one in logger.filters):
            logger.addFilter(RateLimitFilter())
