"""Clients' messages on their way to Ray replicas; a module of its own, to start quickly."""

from __future__ import annotations

import asyncio
from typing import Any

GONE = {"type": "websocket.disconnect"}  # the client, or its session to another replica


class Mailbox:
    """A queue for every connection, until its last message is read; an actor of the ingress."""

    def __init__(self) -> None:
        self._boxes: dict[str, asyncio.Queue[dict[str, Any]]] = {}

    async def open(self, key: str, first: dict[str, Any]) -> None:
        """A connection begins, with a message."""
        self._boxes[key] = asyncio.Queue()
        await self.put(key, first)

    async def put(self, key: str, event: dict[str, Any]) -> None:
        """One more message, unless the connection has ended."""
        if key in self._boxes:
            self._boxes[key].put_nowait(event)

    async def get(self, key: str) -> dict[str, Any]:
        """The connection's next message."""
        if key not in self._boxes:
            return GONE
        event = await self._boxes[key].get()
        if event["type"] == GONE["type"]:
            self._boxes.pop(key, None)
        return event

    async def drop(self, key: str) -> None:
        """Nobody will read it any more."""
        self._boxes.pop(key, None)
