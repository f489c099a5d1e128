"""What goes wrong between a real server and real clients: each fault by itself."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from urllib.request import urlopen

import numpy as np
import pytest
from serving import Player, make_engine, running, tiny
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

import tachyscope as ts
from tachyscope.serve.protocol import SUBPROTOCOL

pytestmark = pytest.mark.slow
OPEN = []  # connections of the present test


@pytest.fixture(autouse=True)
def closing():
    yield
    while OPEN:
        OPEN.pop().__exit__(None, None, None)


class Socket:
    """A WebSocket of the package websockets, with the words of Starlette's test client."""

    def __init__(self, url):
        address = url.replace("http", "ws") + "/v1/sessions"
        self.manager = connect(address, subprotocols=[SUBPROTOCOL], max_size=None)
        self.socket = self.manager.__enter__()
        OPEN.append(self.manager)

    def send_text(self, text):
        self.socket.send(text)

    def receive(self):
        try:
            message = self.socket.recv(timeout=60)
        except ConnectionClosed as closed:
            code = closed.rcvd.code if closed.rcvd else 1006
            return {"type": "websocket.close", "code": code}
        return {"type": "", "text" if isinstance(message, str) else "bytes": message}


def play(url, first="open", **fields):
    player = Player(Socket(url))
    player.send(first, format="png", **({"pace": "free"} if first == "open" else {}), **fields)
    player.opened = player.until("opened")
    return player


@contextmanager
def process(folder, *more):
    """The address and the process of `tachyscope serve toy-chunks`."""
    command = [sys.executable, "-m", "tachyscope", "serve", "toy-chunks", "--port", "0",
               "--state", str(folder), "--plan", "dense", *more]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            words = (word for line in server.stdout for word in line.split())
            url = next(word for word in words if word.startswith("http")).rstrip("/")
            while True:
                try:
                    urlopen(f"{url}/health").close()
                    break
                except OSError:
                    time.sleep(0.1)
            yield url, server
        finally:
            server.kill()


def metric(url, line, every=False):
    """A number of /metrics by the beginning of its line, or the sum of all such lines."""
    with urlopen(f"{url}/metrics") as answer:
        rows = answer.read().decode().splitlines()
    found = [float(row.split()[-1]) for row in rows if row.startswith(line)]
    assert every or len(found) == 1
    return sum(found)


def test_sessions_of_a_server_that_was_killed_resume_exactly(tmp_path):
    model = ts.load("toy-chunks")
    with process(tmp_path, "--set", "snapshot_chunks=2") as (url, server):
        player = play(url, seed=4)
        player.send("keys", id=1, actions="w")
        while (told := player.until("snapshot")["chunk"]) < 4:
            pass
        os.kill(server.pid, signal.SIGKILL)
    with process(tmp_path, "--set", "snapshot_chunks=2") as (url, _):
        again = play(
            url, "resume", session=player.opened["session"], secret=player.opened["secret"]
        )
        chunk = again.opened["chunk"]
        assert chunk >= told and chunk % 2 == 0  # none that was told of is lost
        again.send("keys", id=1, actions="a")
        again.until_frame(3 * chunk + 8)
        again.send("log", id=2)
        steps = again.until("log")["log"]["steps"]
    with ts.open(model, "dense", seed=4) as stream:
        wanted = np.concatenate([stream.step(step or None).frames for step in steps])
    assert again.matches(wanted[: 3 * chunk + 9], start=3 * chunk)


def test_a_stopped_server_saves_every_session(tmp_path):
    with process(tmp_path) as (url, server):
        player = play(url)
        player.until_frame(8)
        server.send_signal(signal.SIGTERM)
        while (
            (message := player.next())
            and not isinstance(message, dict)
            or message["type"] != "left"
        ):
            pass
        assert message["code"] == 1012  # come back
        seen = max(chunk for _, chunk in player.chunks)
        assert server.wait(60) == 128 + signal.SIGTERM
    with process(tmp_path) as (url, _):
        again = play(
            url, "resume", session=player.opened["session"], secret=player.opened["secret"]
        )
        assert again.opened["chunk"] > seen  # nothing that was seen is lost


@contextmanager
def deaf(url):
    """A client that opens a session and then neither reads nor answers."""
    with socket.socket() as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        plain.sendall(
            b"GET /v1/sessions HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
            b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
            b"Sec-WebSocket-Protocol: tachyscope.v1\r\n\r\n"
        )
        answer = b""
        while not answer.endswith(b"\r\n\r\n"):
            answer += plain.recv(1)
        text = b'{"type": "open", "pace": "free", "format": "png"}'
        plain.sendall(bytes([0x81, 0x80 | len(text), 0, 0, 0, 0]) + text)  # a mask of zeros
        yield plain


def gone(engine, seconds=60, well=None):
    """Wait until a session has lost its client, while another client reads on."""
    end = time.monotonic() + seconds
    while True:
        lost = [
            one for one in list(engine.pool.sessions.values()) if one.emit is None and one.chunk
        ]
        if lost:
            return lost[0]
        assert time.monotonic() < end, "the client was not cut off"
        if well is None:
            time.sleep(0.05)
        else:
            well.next()


def read_on(player, frames):
    """Read until so many frames later; some between may have been dropped."""
    last = max(player.frames, default=(0, 0, 0))[2]
    while max(player.frames, default=(0, 0, 0))[2] < last + frames:
        message = player.next()
        assert not isinstance(message, dict) or message["type"] != "left", message


def test_a_client_that_reads_nothing_is_cut_off_and_no_other_waits_for_it(tmp_path):
    engine = make_engine(tiny(), tmp_path, send_s=1.0)
    with running(engine, ws_ping_interval=None) as url:
        well = play(url)
        with deaf(url):
            assert gone(engine, well=well).name != well.opened["session"]
            read_on(well, 12)
        assert metric(url, "tachyscope_frames_dropped_total") > 0
        assert metric(url, 'tachyscope_sessions_ended_total{why="unread"}') == 1


def test_a_half_open_socket_is_noticed_by_its_silence(tmp_path):
    engine = make_engine(tiny(), tmp_path)
    with running(engine, ws_ping_interval=0.5, ws_ping_timeout=0.5) as url, deaf(url):
        assert gone(engine, 30).lane is not None


def test_ten_thousand_malformed_messages_crash_nothing(tmp_path):
    rng = random.Random(0)
    good = ['{"type": "keys", "id": 3, "actions": "w"}', '{"type": "reset", "seed": 4}',
            '{"type": "open", "log": {"version": 1}}', '{"type": "rewind", "chunk": 5}']  # fmt: skip

    def broken():
        text = list(rng.choice(good))
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(text))
            other = {"pop": "", "put": chr(rng.randrange(1, 0xD7FF)), "json": rng.choice('{}[]":,0e9-tfn'),
                     "twice": "".join(text[:at])}[rng.choice(["pop", "put", "json", "twice"])]  # fmt: skip
            text[at : at + 1] = other
            text = text or ["0"]
        return "".join(text)

    engine = make_engine(tiny(), tmp_path, messages_per_s=10**6, faults=10**6)
    with running(engine) as url:
        well, ill = play(url), Socket(url)
        ill.send_text('{"type": "open"}')
        answers = []

        def read():
            while (event := ill.receive())["type"] == "":
                answers.append(event.get("text") or "")

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        for _ in range(10_000):
            ill.send_text(broken())
        end = time.monotonic() + 120
        while metric(url, 'tachyscope_messages_total{type="malformed"}') < 9000:
            assert time.monotonic() < end and reader.is_alive()
            read_on(well, 3)
        ill.socket.close()
        assert not any("Traceback" in text or ".py" in text for text in answers)
        assert all(json.loads(text)["type"] for text in answers if text)


def ended(player):
    """The code that a connection ends with."""
    while (event := player.socket.receive())["type"] == "":
        pass
    return event["code"]


def test_a_huge_message_ends_its_connection_alone(tmp_path):
    engine = make_engine(tiny(), tmp_path)
    with running(engine) as url:
        well, says = play(url), play(url)
        # a frame that says it is too big, and sends nothing of it
        says.socket.socket.socket.sendall(b"\x81\xff" + (10_000_000).to_bytes(8, "big") + bytes(4))
        assert ended(says) == 1009
        for _ in range(6):  # it is refused while it is sent
            sends = play(url)
            with suppress(ConnectionClosed):
                sends.socket.send_text("x" * 10_000_000)
            assert ended(sends) == 1009
        read_on(well, 12)


def test_thirty_two_sessions_take_turns(tmp_path):
    engine = make_engine(tiny(), tmp_path, sessions=32, chunks=10**6)
    with running(engine) as url:
        players = [play(url, seed=i) for i in range(32)]
        lives = [engine.pool.sessions[one.opened["session"]] for one in players]
        threads = [threading.Thread(target=one.until_frame, args=(60,)) for one in players]
        for one in threads:
            one.start()
        before = [live.chunk for live in lives]
        spread = []
        while any(one.is_alive() for one in threads):
            done = [live.chunk - old for live, old in zip(lives, before, strict=True)]
            spread.append(max(done) - min(done))
            time.sleep(0.05)
        # by turns, and one may just have had its own when another is counted
        assert len(spread) > 5 and max(spread) <= 2
        sent, made = (metric(url, f"tachyscope_frames_{what}_total") for what in ("sent", "made"))
        dropped = metric(url, "tachyscope_frames_dropped_total")
        assert 0 <= made - sent - dropped < 32 * 20  # the rest is on its way
