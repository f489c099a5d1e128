"""An in-process server of a toy, and a client that speaks its protocol."""

import io
import json
import socket
import threading
import time
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import uvicorn
from PIL import Image
from starlette.testclient import TestClient

from tachyscope.models.wan.config import WanConfig
from tachyscope.models.wan.random import random_wan
from tachyscope.serve import connection, protocol
from tachyscope.serve.app import make_app
from tachyscope.serve.engine import Engine
from tachyscope.serve.limits import Limits
from tachyscope.serve.metrics import Metrics
from tachyscope.serve.security import LOCAL, Guard
from tachyscope.serve.server import Endpoint, listen, uvicorn_config
from tachyscope.serve.snapshots import Snapshots

HOST = "http://localhost"


def tiny():
    """A random model of one layer and few passes: a chunk of three frames in a blink."""
    config = WanConfig(
        dim=48, ffn_dim=64, layers=1, heads=2, text_dim=24, text_len=64, actions=".wsadqe",
        size=(4, 6), stride=(1, 8, 8), steps=(1000, 500),
    )  # fmt: skip
    return random_wan(config, name="toy-chunks")


def make_engine(model, folder, *, name="toy-chunks", plan="live", budget=10**9, chunks=4, **limits):
    limits = {"session_frames": 20_000} | limits  # played as fast as can be, while a test waits
    return Engine(
        model, name, Snapshots(str(folder)), plan=plan, budget=budget, metrics=Metrics(),
        limits=replace(Limits(), **limits), snapshot_chunks=chunks,
    )  # fmt: skip


@contextmanager
def serving(engine, guard=None):
    """An HTTP client of a server that runs meanwhile.

    Many frames may wait for the client: how many of two are dropped depends on the machine.
    """
    app = make_app(engine, guard or Guard())
    many = patch.multiple(connection, FRAMES=1000, CHUNKS=1000)
    with many, TestClient(app, base_url=HOST) as client:
        yield client


@contextmanager
def running(engine, port=0, **options):
    """The address of a real server; options are uvicorn's."""
    listener = listen(Endpoint(port=port))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # few bytes fill it
    app = make_app(engine, Guard(hosts=LOCAL))
    options = {"log_level": "error", "timeout_graceful_shutdown": 1} | options
    config = uvicorn_config(app, engine.limits, **options)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://localhost:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


class Player:
    """A client of a session: sends messages, and sorts what comes."""

    def __init__(self, socket):
        self.socket, self.frames, self.chunks, self.said = socket, {}, {}, []

    def send(self, kind, **fields):
        self.socket.send_text(json.dumps({"type": kind, **fields}))

    def next(self):
        """The next message: a dict, or a header and a picture."""
        event = self.socket.receive()
        if event["type"] == "websocket.close":
            return {"type": "left", "code": event["code"], "reason": event.get("reason", "")}
        if event.get("text") is not None:
            message = json.loads(event["text"])
            self.said.append(message)
            if message["type"] == "chunk":
                self.chunks[message["generation"], message["chunk"]] = message
            return message
        header, file = protocol.Header.read(event["bytes"])
        picture = np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))
        self.frames[header.lane, header.generation, header.frame] = picture
        return header, picture

    def until(self, kind, **fields):
        """Read on until a message of this type with these fields."""
        for _ in range(10_000):
            message = self.next()
            if isinstance(message, dict):
                if message["type"] == kind and fields.items() <= message.items():
                    return message
                assert message["type"] != "left", message
        raise AssertionError(f"no {kind} came")

    def once(self, kind, **fields):
        """The newest such message that came, or the first that will come."""
        came = (one for one in reversed(self.said) if one["type"] == kind)
        known = next((one for one in came if fields.items() <= one.items()), None)
        return known or self.until(kind, **fields)

    def latest(self, generation=1, lane=protocol.MAIN):
        """The newest frame that came; -1 without any."""
        return max((key[2] for key in self.frames if key[:2] == (lane, generation)), default=-1)

    def until_frame(self, frame, generation=1, lane=protocol.MAIN):
        """Read on until that frame or a later one: a busy machine drops some."""
        while self.latest(generation, lane) < frame:
            message = self.next()
            assert not isinstance(message, dict) or message["type"] != "left", message

    def matches(self, wanted, start=0, generation=1, lane=protocol.MAIN):
        """Whether all frames that came from `start` on are those of a video, and most came."""
        found = [
            key[2]
            for key in self.frames
            if key[:2] == (lane, generation) and start <= key[2] < len(wanted)
        ]
        same = [np.array_equal(self.frames[lane, generation, i], wanted[i]) for i in found]
        return all(same) and 2 * len(found) >= len(wanted) - start


@contextmanager
def connected(client, protocols=(protocol.SUBPROTOCOL,), headers=None):
    """A WebSocket of the test client's."""
    fault: BaseException | None = None
    # leaving it, the test client cancels the server's task and then tells of that
    with (
        suppress(CancelledError),
        client.websocket_connect(
            "ws://localhost/v1/sessions", subprotocols=list(protocols), headers=headers or {}
        ) as socket,
    ):
        try:
            yield socket
        except BaseException as raised:
            fault = raised
            raise
    if fault is not None:  # the test client told of its task instead
        raise fault


@contextmanager
def playing(client, first="open", **fields):
    """A session's client, and what it was answered."""
    if first == "open":
        fields = {"format": "png", "pace": "free"} | fields
    with connected(client) as socket:
        player = Player(socket)
        player.send(first, **fields)
        player.opened = player.until("opened")
        yield player
