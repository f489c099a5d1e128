"""Clients' messages on their way to Ray replicas; a module of its own, to start quickly."""

from __future__ import annotations

import asyncio
from typing import Any


class Mailbox:
    """A queue for every connection; an actor of the ingress."""

    def __init__(self) -> None:
        self._boxes: dict[str, asyncio.Queue[dict[str, Any]]] = {}

    async def put(self, key: str, event: dict[str, Any]) -> None:
        self._boxes.setdefault(key, asyncio.Queue()).put_nowait(event)

    async def get(self, key: str) -> dict[str, Any]:
        """The connection's next message; whoever reads the last one leaves nothing behind."""
        box = self._boxes.setdefault(key, asyncio.Queue())
        event = await box.get()
        if event["type"] == "websocket.disconnect":
            self._boxes.pop(key, None)
        return event
