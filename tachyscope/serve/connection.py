"""One client's WebSocket: messages checked at the door, frames sent at their time or dropped."""

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
from tachyscope.serve.live import Event, Live, Show
from tachyscope.serve.picture import decode
from tachyscope.serve.room import Full

logger = logging.getLogger("tachyscope.serve")
T = TypeVar("T")
FRAMES = 2  # that may wait to be sent, of each lane; the newest win
SHOWS = 4  # chunks that may wait to be encoded
WAITING = 4  # costly messages that may wait for a turn
WORDS = 256  # text messages that may wait
HELLO_S = 10.0  # for the first message to come
# close codes: ours are above 4000
POLICY, FAILED, AGAIN_LATER, NORMAL = 1008, 1011, 1013, 1000


class Socket(Protocol):
    """What a connection needs of a WebSocket; Starlette's is one."""

    async def receive(self) -> Any: ...

    async def send_text(self, data: str) -> None: ...

    async def send_bytes(self, data: bytes) -> None: ...

    async def close(self, code: int, reason: str | None) -> None: ...


class Connection:
    """A WebSocket and the session that it plays."""

    def __init__(self, socket: Socket, engine: Engine, pool: Executor) -> None:
        self.socket, self.engine, self.pool = socket, engine, pool
        self.limits, self.metrics = engine.limits, engine.metrics
        self.live: Live | None = None
        self._loop = asyncio.get_running_loop()
        self._words: deque[str] = deque()
        self._frames: deque[tuple[bytes, Show | None]] = deque()
        self._shows: deque[Show] = deque()
        self._drops = 0  # how often all that waited was dropped
        self._to_send, self._to_show = asyncio.Event(), asyncio.Event()
        self._leaving: tuple[int, str] | None = None
        self._ended = False
        self._heard = time.monotonic()
        self._faults, self._bucket = 0, Bucket(self.limits.messages_per_s)
        self._half = self.limits.messages_per_s / 2  # what a costly or a very long message counts
        self._format, self._quality = "jpeg", 85
        self._streams: dict[int, H264] = {}  # by lane, where frames are no pictures by themselves

    async def run(self) -> None:
        """Serve the client until it leaves, or is sent away."""
        try:
            await self._serve()
        finally:
            self._ended = True
            self._drop_all()
            # not waited for: this task may be cancelled, and even while a session is being opened
            self.engine.call(lambda: self.engine.detach(self.tell))

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

    def tell(self, event: Event) -> None:
        """Take what the session tells; from any thread."""
        self._loop.call_soon_threadsafe(self._take, event)

    def _take(self, event: Event) -> None:
        if isinstance(event, Show):
            if self._ended:  # of a step that was under way when the client left
                self.metrics.dropped.inc(len(event.frames))
                return
            if len(self._shows) >= SHOWS:
                self.metrics.dropped.inc(len(self._shows.popleft().frames))
            self._shows.append(event)
            self._to_show.set()
            return
        if event["type"] == "began":  # frames of the last generation are no news
            self._drop_all()
        self._say(event)
        if event["type"] == "closed":
            self._leave(NORMAL, str(event["reason"]))

    def _drop_all(self) -> None:
        """Send none of the frames that wait."""
        self.metrics.dropped.inc(len(self._frames) + sum(len(one.frames) for one in self._shows))
        self._shows.clear()
        self._frames.clear()
        self._drops += 1
        for stream in self._streams.values():
            stream.key = True

    def _say(self, message: dict[str, object]) -> None:
        if len(self._words) >= WORDS:
            self._leave(POLICY, "messages were left unread")
            return
        self._words.append(protocol.write_json(message))
        self._to_send.set()

    def _leave(self, code: int, reason: str) -> None:
        """Send what waits, then close."""
        self._leaving = self._leaving or (code, reason)
        self._to_send.set()

    async def _receive(self) -> None:
        while self._leaving is None:
            wait = self.limits.idle_s if self.live else HELLO_S
            try:
                event = await asyncio.wait_for(self.socket.receive(), wait)
            except TimeoutError:
                self.metrics.ended.labels("idle").inc()
                self._leave(POLICY, f"nothing was heard for {wait:g} s")
                break
            if event["type"] == "websocket.disconnect":
                return
            await self._hear(event)
        await asyncio.Event().wait()  # the sender ends it

    async def _hear(self, event: Mapping[str, Any]) -> None:
        limits, text = self.limits, event.get("text")
        # two of the largest a second, or so many small ones
        size = len(text or event.get("bytes") or "")
        if not self._bucket.take(1 + self._half * size / limits.log_bytes):
            self.metrics.refused.labels("rate").inc()
            self._leave(POLICY, f"over {limits.messages_per_s} messages a second")
            return
        message: protocol.Message | None = None
        try:
            if text is None:
                await self._look(event.get("bytes") or b"")
                return
            if len(text) > limits.message_bytes:
                async with self.engine.reading:  # one at a time, and others' messages between
                    message = protocol.parse(text, limits)
                    await asyncio.sleep(0)
            else:
                message = protocol.parse(text, limits)
            self.metrics.messages.labels(message.type).inc()
            await self._obey(message)
        except Full as fault:
            self.metrics.refused.labels("full").inc()
            self._say({"type": "error", "code": 503, "message": str(fault), "retry_after_s": 30})
            self._leave(AGAIN_LATER, "no room")
        except TachyscopeError as fault:
            self._faults += 1
            self.metrics.messages.labels("malformed").inc()
            error = {"type": "error", "code": 400, "message": str(fault)}
            self._say(error if message is None else error | {"id": message.id})
            if self._faults >= self.limits.faults:
                self._leave(POLICY, f"{self._faults} malformed messages")
        except Exception:
            logger.exception("a message of a client failed")
            words = "the server failed at this message, and its log has why"
            self._say({"type": "error", "code": 500, "message": words})
            self._leave(FAILED, "the server failed")

    async def _look(self, data: bytes) -> None:
        """Take a picture of the client's camera."""
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
        picture = await self._loop.run_in_executor(self.pool, decode, data, size)
        self.engine.feed(live, picture)

    async def _obey(self, message: protocol.Message) -> None:
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
            self.pool.submit(_check, live, message.id, self._quality)
            return
        if isinstance(message, protocol.Close):
            await _done(engine.call(lambda: engine.close(live)))
            self.live = None
            self._say({"type": "closed", "reason": "closed by the client"})
            self._leave(NORMAL, "closed")
            return
        engine.post(live, checked)

    def _begin(self, message: protocol.Open | protocol.Resume) -> Live:
        """A session, told to the client before its first turn; in the engine's thread."""
        if isinstance(message, protocol.Open):
            live = self.engine.open(message, self.tell)
        else:
            live = self.engine.resume(message, self.tell)
        model = self.engine.model
        live.say(
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
            live.say(type="notice", code="snapshot_damaged", message=words)
            live.lost = 0
        return live

    async def _play(self) -> None:
        """Encode frames and release them at their time; a newer chunk hurries an older one."""
        while True:
            await self._wait(self._to_show)
            while self._shows:
                await self._release(self._shows.popleft())

    async def _release(self, show: Show) -> None:
        begun, count = time.monotonic(), len(show.frames)
        lane, drops = show.header.lane, self._drops
        for i, frame in enumerate(show.frames):
            self._make_room(lane)
            try:
                file, flags = await self._loop.run_in_executor(self.pool, self._encode, lane, frame)
                await self._pause(begun + i * show.span_s / count - time.monotonic())
            except asyncio.CancelledError:
                self.metrics.dropped.inc(count - i)
                raise
            if self._drops != drops:  # these are no news any more
                self.metrics.dropped.inc(count - i)
                return
            header = show.header._replace(
                format=protocol.FORMATS.index(self._format),
                frame=show.header.frame + i,
                flags=flags | (protocol.LAST if i == count - 1 else 0),
            )
            self._frames.append((header.pack() + file, None if i else show))
            self._to_send.set()

    def _make_room(self, lane: int) -> None:
        """Drop the oldest frame of a lane where too many wait; of a stream all, and begin anew."""
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
        """A frame's file and its flags; in an encoder's thread."""
        if self._format != "h264":
            return protocol.encode(frame, self._format, self._quality), protocol.KEY
        if lane not in self._streams:
            self._streams[lane] = H264(self.engine.model.fps, self._quality)
        data, key = self._streams[lane].encode(frame)
        return data, protocol.KEY if key else 0

    async def _pause(self, seconds: float) -> None:
        """Wait that long, or until another chunk is there."""
        if seconds <= 0 or self._shows:
            return
        self._to_show.clear()
        try:
            await asyncio.wait_for(self._to_show.wait(), seconds)
        except TimeoutError:
            return
        self._to_show.set()

    async def _send(self) -> None:
        while True:
            while self._words:
                await self._within(self.socket.send_text(self._words.popleft()))
            if self._leaving is not None:
                await self._within(self.socket.close(*self._leaving))
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
            await self._wait(self._to_send)

    async def _within(self, sending: Awaitable[None]) -> None:
        """Send; a client that leaves it unread for too long is cut off."""
        try:
            await asyncio.wait_for(sending, self.limits.send_s)
        except TimeoutError:
            self.metrics.ended.labels("unread").inc()
            raise WebSocketDisconnect(POLICY) from None

    @staticmethod
    async def _wait(event: asyncio.Event) -> None:
        await event.wait()
        event.clear()


def _check(live: Live, asked: int, quality: int) -> None:
    """Tell a session's client of its walls; in an encoder's thread."""
    generation = live.generation
    try:
        found, beside = live.walls.check(live.log), live.beside_walls.check(live.log)
        for one in found + beside:
            for name in ("made", "truth"):
                file = protocol.encode(one[name], "jpeg", quality)
                one[name] = base64.b64encode(file).decode()
        live.say(type="check", id=asked, generation=generation, walls=found, beside=beside)
    except Exception:
        logger.exception("a check of session %s failed", live.name)


async def _done(future: Future[T]) -> T:
    """What the engine's thread made of a call."""
    return await asyncio.wrap_future(future)
