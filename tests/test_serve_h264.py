"""Frames as an H.264 stream over the WebSocket: decoded in order, and after frames were dropped."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import av
import numpy as np
import pytest
from serving import connected, make_engine, serving, tiny

from tachyscope.core.errors import TachyscopeError
from tachyscope.measure.quality import psnr
from tachyscope.serve import connection as connections
from tachyscope.serve import protocol
from tachyscope.serve.connection import Connection
from tachyscope.serve.h264 import H264
from tachyscope.serve.live_session import ChunkFrames

FORMAT = protocol.FORMATS.index("h264")


def walk(count, size=(64, 96)):
    """Frames of a picture that moves by, with nothing that a block cannot hold."""
    y, x = np.mgrid[: size[0], : size[1]]
    return np.stack([
        np.stack([128 + 100 * np.sin((x + 3 * i) / 9), 128 + 100 * np.cos(y / 7), (x + y + 4 * i) % 256 / 2 + 60], -1)
        for i in range(count)
    ]).astype(np.uint8)  # fmt: skip


class Player:
    """What a decoder shows of messages, which begin at a key frame."""

    def __init__(self):
        self.codec, self.shown = av.CodecContext.create("h264", "r"), {}

    def take(self, message):
        header, data = protocol.Header.read(message)
        assert header.format == FORMAT
        assert self.shown or header.flags & protocol.KEY
        (picture,) = self.codec.decode(av.Packet(data))  # at once: no frame waits for another
        self.shown[header.generation, header.frame] = picture.to_ndarray(format="rgb24")
        return header


def test_a_hundred_frames_of_a_session_are_decoded_in_order(tmp_path):
    with serving(make_engine(tiny(), tmp_path)) as client, connected(client) as socket:
        socket.send_json({"type": "open", "format": "h264", "quality": 100, "pace": "free"})
        player, order = Player(), []
        while len(order) < 100:
            event = socket.receive()
            if event.get("bytes") is not None:
                order.append(player.take(event["bytes"]).frame)
    assert order == list(range(100)) and len(player.shown) == 100
    assert player.codec.name == "h264" and player.shown[1, 99].shape == (32, 48, 3)


def test_what_is_decoded_is_what_was_encoded():
    frames, encoder, player = walk(100), H264(16, 85), av.CodecContext.create("h264", "r")
    packets = [encoder.encode(frame) for frame in frames]
    assert [key for _, key in packets] == [True] + [False] * 99
    shown = [player.decode(av.Packet(data))[0].to_ndarray(format="rgb24") for data, _ in packets]
    assert psnr(frames, np.stack(shown)).min() > 26
    # a moving picture takes less than pictures by themselves
    pictures = sum(len(protocol.encode(frame, "jpeg", 85)) for frame in frames)
    assert sum(len(data) for data, _ in packets) < pictures / 2


def test_a_frame_that_is_asked_to_needs_none_before_it():
    frames, encoder = walk(6), H264(16, 85)
    for frame in frames[:4]:
        encoder.encode(frame)
    encoder.key = True
    data, key = encoder.encode(frames[4])
    assert key
    (alone,) = av.CodecContext.create("h264", "r").decode(av.Packet(data))
    assert psnr(frames[4:5], alone.to_ndarray(format="rgb24")[None]).min() > 26


def test_a_session_of_odd_sides_is_refused_and_its_client_may_take_jpegs(tmp_path, monkeypatch):
    engine = make_engine(tiny(), tmp_path)
    with serving(engine) as client, connected(client) as socket:
        with monkeypatch.context() as odd:
            odd.setattr(engine.model, "size", (33, 48))
            socket.send_json({"type": "open", "id": 5, "format": "h264"})
            told = socket.receive_json()
        assert (told["type"], told["code"], told["id"]) == ("error", 400, 5)
        assert "frames of even sides, got 33x48: take format jpeg" in told["message"]
        socket.send_json({"type": "open", "format": "jpeg"})
        assert socket.receive_json()["type"] == "opened"


def test_odd_sides_are_refused():
    with pytest.raises(TachyscopeError, match="frames of even sides, got 5x6: take format jpeg"):
        H264(16, 85).encode(np.zeros((5, 6, 3), np.uint8))


class SlowSocket:
    """A client that reads when it is let."""

    def __init__(self):
        self.sent, self.reads = [], asyncio.Event()

    async def receive(self):
        await asyncio.Event().wait()

    async def send_text(self, data):
        pass

    async def send_bytes(self, data):
        await self.reads.wait()
        self.sent.append(data)

    async def close(self, code, reason):
        pass


def test_after_dropped_frames_and_a_new_generation_a_key_frame_comes(tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "CHUNKS", 100)
    engine, frames = make_engine(tiny(), tmp_path), walk(40)
    dropped = engine.metrics.registry.get_sample_value

    def show(generation, chunk):
        header = protocol.Header(1, 0, protocol.MAIN, 0, generation, chunk, 3 * chunk)
        return ChunkFrames(header, frames[3 * chunk : 3 * chunk + 3], 0.0)

    async def play():
        socket, pool = SlowSocket(), ThreadPoolExecutor(1)
        one = Connection(socket, engine, pool)
        one._format = "h264"
        tasks = [asyncio.create_task(work()) for work in (one._play, one._send)]
        for chunk in range(6):
            one._on_event(show(1, chunk))
        while dropped("tachyscope_frames_dropped_total") < 12:
            await asyncio.sleep(0.01)
        socket.reads.set()
        while not socket.sent:
            await asyncio.sleep(0.01)
        one._on_event({"type": "began"})
        for chunk in range(3):
            one._on_event(show(2, chunk))
        while not socket.sent or protocol.Header.read(socket.sent[-1])[0][4:] != (2, 2, 8):
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        pool.shutdown()
        return socket.sent

    player, headers = Player(), []
    for message in asyncio.run(play()):
        headers.append(player.take(message))
        key = headers[-1].flags & protocol.KEY
        gap = len(headers) > 1 and headers[-1].frame != headers[-2].frame + 1
        assert key or not gap  # what a decoder has not seen is not needed
    assert any(one.generation == 1 for one in headers) and len(headers) < 27
    for (_, frame), picture in player.shown.items():
        assert psnr(frames[frame][None], picture[None]).min() > 26


def test_a_key_frame_of_the_last_generation_is_followed_by_one_of_the_next(tmp_path):
    """The new one begins after a frame's encoding is queued, and before it starts."""
    engine, frames = make_engine(tiny(), tmp_path), walk(5)

    async def play():
        socket, pool, loop = SlowSocket(), ThreadPoolExecutor(1), asyncio.get_running_loop()
        socket.reads.set()
        one = Connection(socket, engine, pool)
        one._format = "h264"
        encode = one._encode

        def late(lane, frame):
            if np.array_equal(frame, frames[1]):
                begun = threading.Event()
                loop.call_soon_threadsafe(begin, begun)
                assert begun.wait(30)
            return encode(lane, frame)

        def begin(begun):
            one._on_event({"type": "began"})
            header = protocol.Header(1, 0, protocol.MAIN, 0, 2, 0, 2)
            one._on_event(ChunkFrames(header, frames[2:], 0.0))
            begun.set()

        one._encode = late
        tasks = [asyncio.create_task(work()) for work in (one._play, one._send)]
        header = protocol.Header(1, 0, protocol.MAIN, 0, 1, 0, 0)
        one._on_event(ChunkFrames(header, frames[:2], 0.0))
        while not socket.sent or protocol.Header.read(socket.sent[-1])[0].frame != 4:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        pool.shutdown()
        return socket.sent

    headers = [protocol.Header.read(message)[0] for message in asyncio.run(play())]
    first = next(one for one in headers if one.generation == 2)
    assert first.flags & protocol.KEY
