"""One client's WebSocket: its messages are checked first; frames are sent in time or dropped."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Awaitable, Mapping
from concurrent.futures import Executor, Future
from typing import Any, Protocol, TypeVar

import numpy as np
from starlette.websockets import WebSocketDisconnect

from tachyscope.core.errors import TachyscopeError
from tachyscope.serve import protocol
from tachyscope.serve.engine import Engine
from tachyscope.serve.h264 import H264, check_size
from tachyscope.serve.limits import Bucket
from tachyscope.serve.live_session import ChunkFrames, Event, LiveSession
from tachyscope.serve.picture import decode
from tachyscope.serve.session_pool import Full

logger = logging.getLogger("tachyscope.serve")
T = TypeVar("T")
FRAMES = 2  # frames of each lane that may wait to be sent; the newest are kept
CHUNKS = 4  # chunks that may wait to be encoded
WAITING = 4  # costly messages that may wait in a session's inbox
MESSAGES = 256  # text messages that may wait
HELLO_S = 10.0  # until the first message must have come
# close codes: ours are above 4000
POLICY, FAILED, AGAIN_LATER, NORMAL = 1008, 1011, 1013, 1000


class Socket(Protocol):
    """The part of Starlette's WebSocket that a connection uses."""

    async def receive(self) -> Any: ...

    async def send_text(self, data: str) -> None: ...

    async def send_bytes(self, data: bytes) -> None: ...

    async def close(self, code: int, reason: str | None) -> None: ...


class Connection:
    """A WebSocket and the session that it plays."""

    def __init__(self, socket: Socket, engine: Engine, encoders: Executor) -> None:
        self.socket, self.engine, self.encoders = socket, engine, encoders
        self.limits, self.metrics = engine.limits, engine.metrics
        self.live: LiveSession | None = None
        self._loop = asyncio.get_running_loop()
        self._messages: deque[str] = deque()
        self._frames: deque[tuple[bytes, ChunkFrames | None]] = deque()
        self._chunks: deque[ChunkFrames] = deque()
        self._drops = 0  # count of `_drop_all`
        self._send_ready, self._chunk_ready = asyncio.Event(), asyncio.Event()
        self._closing: tuple[int, str] | None = None
        self._ended = False
        self._faults, self._bucket = 0, Bucket(self.limits.messages_per_s)
        self._half = self.limits.messages_per_s / 2  # what a costly or a very long message counts
        self._format, self._quality = "jpeg", 85
        self._streams: dict[int, H264] = {}  # by lane, where frames are no pictures by themselves

    async def run(self) -> None:
        """Serve the client until it leaves or its connection is closed."""
        try:
            await self._serve()
        finally:
            self._ended = True
            self._drop_all()
            # not waited for: this task may be cancelled, and even while a session is being opened
            self.engine.call(lambda: self.engine.detach(self.emit))

    async def _serve(self) -> None:
        tasks = [asyncio.create_task(one()) for one in (self._receive, self._play, self._send)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            fault = task.exception()
            if fault is not None and not isinstance(fault, WebSocketDisconnect | RuntimeError):
                raise fault

    def emit(self, event: Event) -> None:
        """Queue an event of the session for the client; from any thread."""
        self._loop.call_soon_threadsafe(self._on_event, event)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, ChunkFrames):
            if self._ended:  # of a step that was under way when the client left
                self.metrics.dropped.inc(len(event.frames))
                return
            if len(self._chunks) >= CHUNKS:
                self.metrics.dropped.inc(len(self._chunks.popleft().frames))
            self._chunks.append(event)
            self._chunk_ready.set()
            return
        if event["type"] == "began":  # frames of the last generation are out of date
            self._drop_all()
        self._queue(event)
        if event["type"] == "closed":
            self._close(NORMAL, str(event["reason"]))

    def _drop_all(self) -> None:
        """Drop all frames that wait."""
        self.metrics.dropped.inc(len(self._frames) + sum(len(one.frames) for one in self._chunks))
        self._chunks.clear()
        self._frames.clear()
        self._drops += 1
        for stream in self._streams.values():
            stream.key = True

    def _queue(self, message: dict[str, object]) -> None:
        if len(self._messages) >= MESSAGES:
            self._close(POLICY, "messages were left unread")
            return
        self._messages.append(protocol.write_json(message))
        self._send_ready.set()

    def _close(self, code: int, reason: str) -> None:
        """Close the socket once the messages that wait are sent."""
        self._closing = self._closing or (code, reason)
        self._send_ready.set()

    async def _receive(self) -> None:
        while self._closing is None:
            wait = self.limits.idle_s if self.live else HELLO_S
            try:
                event = await asyncio.wait_for(self.socket.receive(), wait)
            except TimeoutError:
                self.metrics.ended.labels("idle").inc()
                self._close(POLICY, f"nothing was heard for {wait:g} s")
                break
            if event["type"] == "websocket.disconnect":
                return
            await self._on_message(event)
        await asyncio.Event().wait()  # until `_send` has closed the socket

    async def _on_message(self, event: Mapping[str, Any]) -> None:
        limits, text = self.limits, event.get("text")
        # at most two of the largest a second, or `messages_per_s` small ones
        size = len(text or event.get("bytes") or "")
        if not self._bucket.take(1 + self._half * size / limits.log_bytes):
            self.metrics.refused.labels("rate").inc()
            self._close(POLICY, f"over {limits.messages_per_s} messages a second")
            return
        message: protocol.Message | None = None
        try:
            if text is None:
                await self._on_picture(event.get("bytes") or b"")
                return
            if len(text) > limits.message_bytes:
                async with self.engine.reading:  # one at a time, and others' messages between
                    message = protocol.parse(text, limits)
                    await asyncio.sleep(0)
            else:
                message = protocol.parse(text, limits)
            self.metrics.messages.labels(message.type).inc()
            await self._dispatch(message)
        except Full as fault:
            self.metrics.refused.labels("full").inc()
            self._queue({"type": "error", "code": 503, "message": str(fault), "retry_after_s": 30})
            self._close(AGAIN_LATER, "no room")
        except TachyscopeError as fault:
            self._faults += 1
            self.metrics.messages.labels("malformed").inc()
            error = {"type": "error", "code": 400, "message": str(fault)}
            self._queue(error if message is None else error | {"id": message.id})
            if self._faults >= self.limits.faults:
                self._close(POLICY, f"{self._faults} malformed messages")
        except Exception:
            logger.exception("a message of a client failed")
            words = "the server failed at this message, and its log has why"
            self._queue({"type": "error", "code": 500, "message": words})
            self._close(FAILED, "the server failed")

    async def _on_picture(self, data: bytes) -> None:
        """Give a picture of the client's camera to its session."""
        live, most = self.live, self.limits.message_bytes
        if live is None or not live.log.opening.strength:
            raise TachyscopeError(
                "a client's messages are text, unless its session follows its camera"
            )
        if len(data) > most:
            raise TachyscopeError(
                f"a camera's picture has at most {most} bytes, got {len(data)}: make it smaller"
            )
        size = self.engine.model.size
        picture = await self._loop.run_in_executor(self.encoders, decode, data, size)
        self.engine.feed(live, picture)

    async def _dispatch(self, message: protocol.Message) -> None:
        live, engine, checked = self.live, self.engine, message
        if isinstance(message, protocol.Open | protocol.Resume):
            if live is not None:
                raise TachyscopeError("this connection has a session: reset it, or open a second")
            if message.format == "h264":
                check_size(*engine.model.size)
            self._format, self._quality = message.format, message.quality
            self.live = await _done(engine.call(lambda: self._begin(message)))
            return
        if live is None:
            raise TachyscopeError("a connection's first message is open or resume")
        if isinstance(message, protocol.Keys):
            action = live.key_map.action(message.actions)
            checked = dataclasses.replace(message, actions=action)
        if isinstance(message, protocol.COSTLY):
            waiting = sum(isinstance(one, protocol.COSTLY) for one, _ in tuple(live.inbox))
            if waiting >= WAITING or not self._bucket.take(self._half):
                self.metrics.refused.labels("costly").inc()
                words = f"{message.type} is costly: at most two such a second, and {WAITING} wait"
                live.receipt(message, "refused", reason=words)
                return
        live.receipt(message, "received")
        if isinstance(message, protocol.Check):
            self.encoders.submit(_check, live, message.id, self._quality)
            return
        if isinstance(message, protocol.Close):
            await _done(engine.call(lambda: engine.close(live)))
            self.live = None
            self._queue({"type": "closed", "reason": "closed by the client"})
            self._close(NORMAL, "closed")
            return
        engine.post(live, checked)

    def _begin(self, message: protocol.Open | protocol.Resume) -> LiveSession:
        """Open or resume a session and send `opened`; in the engine's thread."""
        if isinstance(message, protocol.Open):
            live = self.engine.open(message, self.emit)
        else:
            live = self.engine.resume(message, self.emit)
        model = self.engine.model
        live.send(
            type="opened",
            version=protocol.VERSION,
            model=self.engine.name,
            secret=live.secret,
            fps=model.fps,
            actions=model.actions or "",
            chords=live.key_map.chords,
            looks=live.key_map.looks,
            size=list(model.size),
            parameters=sum(one.numel() for one in model.transformer.parameters()),
            device=model.device.type,
            frames_most=self.limits.session_frames,
            **live.described(),
        )
        if live.lost:
            words = (
                f"the last {live.lost} chunks are lost, as their snapshots were damaged: the "
                f"session goes on after chunk {live.chunk}"
            )
            live.send(type="notice", code="snapshot_damaged", message=words)
            live.lost = 0
        return live

    async def _play(self) -> None:
        """Encode frames and release them in time; an older chunk is hurried by a newer one."""
        while True:
            await self._wait(self._chunk_ready)
            while self._chunks:
                await self._release(self._chunks.popleft())

    async def _release(self, show: ChunkFrames) -> None:
        begun, count = time.monotonic(), len(show.frames)
        lane, drops = show.header.lane, self._drops
        for i, frame in enumerate(show.frames):
            self._drop_oldest(lane)
            try:
                encoding = self._loop.run_in_executor(self.encoders, self._encode, lane, frame)
                file, flags = await encoding
                await self._pause(begun + i * show.span_s / count - time.monotonic())
            except asyncio.CancelledError:
                self.metrics.dropped.inc(count - i)
                raise
            if self._drops != drops:  # another generation has begun
                self.metrics.dropped.inc(count - i)
                if lane in self._streams:
                    self._streams[lane].key = True  # this one, which is dropped, may be its key
                return
            header = show.header._replace(
                format=protocol.FORMATS.index(self._format),
                frame=show.header.frame + i,
                flags=flags | (protocol.LAST if i == count - 1 else 0),
            )
            self._frames.append((header.pack() + file, None if i else show))
            self._send_ready.set()

    def _drop_oldest(self, lane: int) -> None:
        """Drop a lane's oldest frame if too many wait; of H.264 all, before a key frame."""
        waiting = [one for one in self._frames if one[0][2] == lane]
        if len(waiting) < FRAMES:
            return
        stream = self._streams.get(lane)
        for one in waiting if stream else waiting[:1]:
            self._frames.remove(one)
            self.metrics.dropped.inc()
        if stream:
            stream.key = True

    def _encode(self, lane: int, frame: np.ndarray) -> tuple[bytes, int]:
        """Encode a frame: its file and its flags; in an encoder's thread."""
        if self._format != "h264":
            return protocol.encode(frame, self._format, self._quality), protocol.KEY
        if lane not in self._streams:
            self._streams[lane] = H264(self.engine.model.fps, self._quality)
        data, key = self._streams[lane].encode(frame)
        return data, protocol.KEY if key else 0

    async def _pause(self, seconds: float) -> None:
        """Wait this long, or until another chunk has come."""
        if seconds <= 0 or self._chunks:
            return
        self._chunk_ready.clear()
        try:
            await asyncio.wait_for(self._chunk_ready.wait(), seconds)
        except TimeoutError:
            return
        self._chunk_ready.set()

    async def _send(self) -> None:
        while True:
            while self._messages:
                await self._within(self.socket.send_text(self._messages.popleft()))
            if self._closing is not None:
                await self._within(self.socket.close(*self._closing))
                return
            if self._frames:
                data, show = self._frames.popleft()
                try:
                    await self._within(self.socket.send_bytes(data))
                except BaseException:
                    self.metrics.dropped.inc()
                    raise
                self.metrics.sent.inc()
                for asked in show.asked_at if show else ():
                    self.metrics.key_s.observe(time.monotonic() - asked)
                continue
            await self._wait(self._send_ready)

    async def _within(self, sending: Awaitable[None]) -> None:
        """Await a send; a client that does not read it within `send_s` is disconnected."""
        try:
            await asyncio.wait_for(sending, self.limits.send_s)
        except TimeoutError:
            self.metrics.ended.labels("unread").inc()
            raise WebSocketDisconnect(POLICY) from None

    @staticmethod
    async def _wait(event: asyncio.Event) -> None:
        await event.wait()
        event.clear()


def _check(live: LiveSession, asked: int, quality: int) -> None:
    """Send a session's client the check of its walls; in an encoder's thread."""
    generation = live.generation
    try:
        found, beside = live.walls.check(live.log), live.beside_walls.check(live.log)
        for one in found + beside:
            for name in ("made", "truth"):
                file = protocol.encode(one[name], "jpeg", quality)
                one[name] = base64.b64encode(file).decode()
        live.send(type="check", id=asked, generation=generation, walls=found, beside=beside)
    except Exception:
        logger.exception("a check of session %s failed", live.name)


async def _done(future: Future[T]) -> T:
    """The result of a call in the engine's thread."""
    return await asyncio.wrap_future(future)
