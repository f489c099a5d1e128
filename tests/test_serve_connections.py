"""What a server bears before a request is whole: half ones, many, slow, and what it leaves."""

import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
from plain_clients import answer, head, play, raw
from serving import make_engine, running, tiny
from websockets.exceptions import ConnectionClosed, WebSocketException

from tachyscope.serve.http import DRAIN_BYTES, DRAIN_S, RateLimitFilter
from tachyscope.serve.scratch import Scratch


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture
def engine(model, tmp_path):
    return make_engine(model, tmp_path)


def test_half_a_request_is_given_up_and_blocks_nobody(model, tmp_path):
    engine = make_engine(model, tmp_path, request_s=1.0, connections_per_address=20)
    half = b"GET / HTTP/1.1\r\nHost: localhost\r\nX-a: "
    with running(engine) as url, ExitStack() as stack:
        halves = [stack.enter_context(raw(url)) for _ in range(60)]
        for plain in halves:
            with suppress(OSError):
                plain.sendall(half)
        begun = time.monotonic()
        for source in ("127.0.0.2", "127.0.0.1"):  # from elsewhere, and beside them
            with raw(url, source) as plain:
                plain.sendall(head("GET /health", "Connection: close"))
                assert answer(plain).startswith(b"HTTP/1.1 200")
        with play(url) as player:
            player.until("chunk")
        assert [answer(plain) for plain in halves] == [b""] * 60
        assert time.monotonic() - begun < 20


def test_a_slow_head_is_given_up_however_it_dribbles(model, tmp_path):
    engine = make_engine(model, tmp_path, request_s=0.6)
    with running(engine) as url, raw(url) as plain:
        plain.sendall(head("GET /health"))  # the first is answered, and the second never comes
        with pytest.raises(OSError, match="reset|Broken pipe"):
            for byte in b"GET /health HTTP/1.1" * 30:  # of a minute
                plain.sendall(bytes([byte]))
                time.sleep(0.1)


def test_one_address_has_so_many_sessions_and_others_find_room(model, tmp_path):
    engine = make_engine(model, tmp_path, connections_per_address=2)
    with running(engine) as url, play(url), play(url):
        with pytest.raises((OSError, WebSocketException)), play(url):
            pass
        with raw(url, "127.0.0.2") as plain:
            plain.sendall(head("GET /health", "Connection: close"))
            assert answer(plain).startswith(b"HTTP/1.1 200")


def test_a_connection_that_left_counts_no_more(model, tmp_path):
    engine, end = make_engine(model, tmp_path, connections_per_address=1), time.monotonic() + 30
    with running(engine) as url:
        for _ in range(3):
            while True:
                try:
                    with play(url) as player:
                        player.until("chunk")
                    break
                except (OSError, WebSocketException):
                    assert time.monotonic() < end


def unread(url, requests, source="127.0.0.1"):
    """A connection whose client sends requests, and reads a byte of their answers."""
    port = int(url.rpartition(":")[2])
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    plain.bind((source, 0))
    plain.connect(("127.0.0.1", port))
    plain.settimeout(20)
    plain.sendall(head("GET /page.css") * requests)
    plain.recv(1)
    return closing(plain)


def sockets():
    """How many this process has open."""
    count = 0
    for one in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            count += os.readlink(one).startswith("socket:")
    return count


def test_a_connection_counts_until_its_client_took_what_it_was_sent(model, tmp_path):
    engine = make_engine(model, tmp_path, connections_per_address=2)
    with running(engine, timeout_keep_alive=0.05) as url, ExitStack() as stack:
        before = sockets()
        for _ in range(6):  # each is answered, then closed, and its last answer is not taken
            stack.enter_context(unread(url, 3))
            time.sleep(0.2)
        with raw(url) as plain:
            plain.sendall(head("GET /health", "Connection: close"))
            assert answer(plain).startswith(b"HTTP/1.1 200")
        assert sockets() - before <= 6 + 2


def test_an_answer_that_is_not_read_ends_its_connection(model, tmp_path):
    engine = make_engine(model, tmp_path, connections_per_address=1, send_s=0.3)
    with running(engine) as url, unread(url, 60):
        told, end = b"", time.monotonic() + 30
        while not told.startswith(b"HTTP/1.1 200"):
            assert time.monotonic() < end, "the connection still has its place"
            with suppress(OSError), raw(url) as plain:
                plain.sendall(head("GET /health", "Connection: close"))
                told = answer(plain)


def test_where_all_connections_are_taken_a_silent_one_makes_room(model, tmp_path):
    engine = make_engine(model, tmp_path, connections=3)
    with running(engine) as url, ExitStack() as stack:
        for i in range(3):
            stack.enter_context(raw(url, f"127.0.0.{2 + i}")).sendall(b"GET / HTTP/1.1\r\n")
        with raw(url) as plain:
            plain.sendall(head("GET /health", "Connection: close"))
            assert answer(plain).startswith(b"HTTP/1.1 200")


UPGRADE = ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13",
           "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", "Sec-WebSocket-Protocol: tachyscope.v1"]  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [["Content-Length: 5"], [f"x{i}: a" for i in range(300)], ["x: " + 9000 * "a"]],
    ids=["body", "many", "long"],
)
def test_an_opening_of_a_websocket_that_cannot_be_read_is_answered(engine, more):
    with running(engine) as url, raw(url) as plain:
        plain.sendall(head("GET /v1/sessions", *UPGRADE, *more))
        assert answer(plain).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(("piece", "pause"), [(2**20, 0.0), (1, 0.05)], ids=["fast", "slow"])
def test_what_follows_a_message_that_is_too_long_is_read_within_bounds(engine, piece, pause):
    with running(engine) as url, raw(url) as plain:
        plain.sendall(head("GET /v1/sessions", *UPGRADE))
        assert plain.recv(65_536).startswith(b"HTTP/1.1 101")
        told, sent, begun = b"", 0, time.monotonic()
        plain.sendall(b"\x81\xff" + (2**40).to_bytes(8, "big") + bytes(4))
        while said := plain.recv(65_536):
            told += said
        assert int.from_bytes(told[2:4], "big") == 1009  # and the server sends no more
        plain.settimeout(30)
        with pytest.raises(ConnectionError):
            while True:
                sent += plain.send(bytes(piece))
                time.sleep(pause)
        assert sent < DRAIN_BYTES + 2**24  # and what the system holds of it
        if pause:
            assert time.monotonic() - begun > 0.9 * DRAIN_S


def test_folders_of_servers_that_were_killed_are_cleared_away(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "from tachyscope.serve.scratch import Scratch; s = Scratch(); print(s.path); import os; "
    child = subprocess.run(
        [sys.executable, "-c", code + "os.kill(os.getpid(), 9)"],
        stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    (killed,) = tmp_path.iterdir()
    assert child.returncode == -9
    alive = Scratch()
    assert killed.exists()  # it might be one that begins just now
    for folder in (killed, alive.path):
        os.utime(folder, (0, 0))
    (tmp_path / "tachyscope-serve-link").symlink_to("/")
    other = Scratch()
    assert not killed.exists() and alive.path.exists()
    alive.remove(), other.remove()
    assert [one.name for one in tmp_path.iterdir()] == ["tachyscope-serve-link"]


def test_a_frame_that_is_no_text_closes_its_connection_and_writes_no_traceback(engine, caplog):
    with running(engine) as url, play(url) as well, play(url) as ill:
        plain = ill.socket.plain
        with plain.protocol_mutex:
            plain.protocol.send_text(b"\xff\xfe{")
            plain.send_data()
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                plain.recv(timeout=30)
        assert closed.value.rcvd.code == 1007
        well.until_frame(well.latest() + 6)
    assert not [one for one in caplog.records if one.exc_info]


def test_a_flood_of_bad_requests_does_not_fill_the_log():
    limit = RateLimitFilter(most=5)
    record = logging.LogRecord("a", 30, "", 0, "words %s", ("x",), None)
    assert sum(limit.filter(record) for _ in range(1000)) == 5
    limit._since -= 61
    assert limit.filter(record) and record.getMessage() == "words x (995 more were held back)"
