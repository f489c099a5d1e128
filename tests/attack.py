"""Seeded inputs of unfriendly clients to a real server, while an honest session plays on it.

`python tests/attack.py --count 5000 --seed 1` prints a line a finding and a summary as JSON. Other
than the misuse of `tachyscope-lab misuse`, inputs are nearly right: talks of valid messages in any
order, one field changed, logs and plans that may just run, requests and frames at the edges of
their protocols. An input is a function of the seed and its number; `--only N` sends it alone.
"""

import argparse
import base64
import io
import json
import os
import random
import re
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import urlopen

import numpy as np
from PIL import Image
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

import tachyscope as ts
from tachyscope.core.plan import NAMES
from tachyscope.core.policy import QUESTIONS, policies, settings
from tachyscope.serve.protocol import SUBPROTOCOL, Header

MODEL = "toy-chunks"
CLIENTS = 8  # that send at once
EACH = 50  # inputs between two looks at the server
ANSWER_S = 3.0
LATE_S = 60.0  # without a chunk of the honest session: the machine may be loaded
GROWN_MB = 250.0  # of the server's memory, once it is warm
PATHS = ["/", "/health", "/metrics", "/v1/models", "/v1/settings", "/v1/videos", "/page.js",
         "/v1/sessions", "/v1/sessions/0123456789abcdef/recording", "/v1/videos/video_00",
         "/%2e%2e/etc/passwd", "//", "/v1/videos/", "/\u00e9", "*", "http://localhost/health"]  # fmt: skip
ODD = [None, True, False, 0, -1, 1, 2**31, 2**53, 10**400, -0.0, 1.5, 1e308, "", "0", "w", "\u202e",
       "a\u0301" * 90, "\U0001f600", "\x1f", [], [[]], {}, {"": {}}, ["w"], "turns", "jpeg"]  # fmt: skip


OPENED = Counter()  # talks, by whether a session was opened at once


class Talk:
    """A WebSocket that opened a session, if the server let it."""

    def __init__(self, url, **fields):
        self.manager = connect(
            url.replace("http", "ws") + "/v1/sessions", subprotocols=[SUBPROTOCOL],
            max_size=None, max_queue=None, close_timeout=0.2, open_timeout=20,
        )  # fmt: skip
        self.socket = self.manager.__enter__()
        self.opened = {}
        if fields:
            self.send(fields)
            self.opened = self.until("opened")
        OPENED[bool(self.opened)] += 1

    def send(self, message):
        self.socket.send(message if isinstance(message, str | bytes) else json.dumps(message))

    def until(self, kind, within=ANSWER_S):
        """The next such message; nothing where it does not come, or an error does."""
        end = time.monotonic() + within
        with suppress(TimeoutError):
            while (left := end - time.monotonic()) > 0:
                told = self.socket.recv(timeout=left)
                if isinstance(told, str) and (message := json.loads(told))["type"] in (
                    kind,
                    "error",
                ):
                    return message if message["type"] == kind else {}
        return {}

    def end(self, draw):
        """Leave: in order, or cut off."""
        if draw.random() < 0.5:
            with suppress(WebSocketException, OSError):
                self.send({"type": "close"})
                self.until("closed", 1)
        self.socket.socket.close() if draw.random() < 0.5 else self.socket.close()


def plan(draw):
    """A plan that may be allowed: a named one with some settings changed."""
    words = [draw.choice(NAMES)]
    for slot in draw.sample(sorted(QUESTIONS), draw.randrange(3)):
        name = draw.choice(sorted(policies(slot)))
        fields = list(settings(policies(slot)[name]))
        some = draw.sample(fields, min(len(fields), draw.randrange(3)))
        values = ["0", "1", "2", "0.5", "3f", "30f", "-1", "nan", "int4", "true", "1e9", "9" * 30]
        given = ",".join(f"{one}={draw.choice(values)}" for one in some)
        words.append(f"{slot}={name}" + f":{given}" * bool(given))
    return " ".join(words)


def message(draw):
    """A valid message, at the edges of what is allowed."""
    text = "".join(
        draw.choice("ab \u202e\u0301\U0001f600\x01\x7f\ufffe")
        for _ in range(draw.choice((0, 9, 2000)))
    )
    return draw.choice([
        {"type": "keys", "actions": draw.choice(["", *".wsadqe"])},
        {"type": "prompt", "text": text},
        {"type": "pause", "paused": draw.random() < 0.5},
        {"type": "reset", "plan": plan(draw), "seed": draw.choice((0, 2**53 - 1)), "prompt": text},
        {"type": "reset"},
        {"type": "rewind", "chunk": draw.choice((0, 1, 4, 2**31 - 1))},
        {"type": "beside", "mode": draw.choice(("off", "turns", "follow"))},
        {"type": "map", "on": draw.random() < 0.5},
        {"type": "record", "on": draw.random() < 0.5},
        {"type": "log"},
        {"type": "mouse", "dx": draw.choice((0, 9, -10_000)), "dy": draw.choice((0, -9))},
        {"type": "prompt", "text": text, "chunk": draw.choice((0, 9, 2**31 - 1))},
        {"type": "check"},
    ]) | {"id": draw.choice((0, 1, 2**31 - 1))}  # fmt: skip


def opening(draw):
    return {"type": "open", "plan": plan(draw) if draw.random() < 0.7 else "live",
            "format": draw.choice(("jpeg", "png", "webp", "h264")), "quality": draw.choice((1, 100)),
            "pace": draw.choice(("model", "free")), "seed": draw.choice((0, 1, 2**53 - 1))}  # fmt: skip


def _image(draw):
    """A picture's file in base64, whole or not."""
    file, size = io.BytesIO(), draw.choice(((1, 1), (9, 7), (60_000, 1), (300, 200)))
    kind = draw.choice(("PNG", "JPEG", "WEBP", "GIF", "TIFF"))
    with suppress(ValueError, OSError):  # WebP's sides are bounded
        Image.new(draw.choice(("RGB", "L", "1")), size).save(file, kind)
    data = bytearray(file.getvalue())
    for _ in range(draw.randrange(4)):
        if data:
            data[draw.randrange(len(data))] = draw.randrange(256)
    return base64.b64encode(data[: draw.choice((len(data), len(data) // 2))]).decode()


def talk(url, draw):
    """Valid messages in any order, with or without waiting."""
    one = Talk(url, **opening(draw))
    for _ in range(draw.randrange(1, 12)):
        one.send(message(draw))
        if draw.random() < 0.3:
            one.until("chunk", 1)
    one.end(draw)


def taken(url, draw):
    """Two clients that take one session from each other, and a third with a wrong secret."""
    one = Talk(url, type="open", plan="live", pace="free")
    one.until("chunk", 2)
    known = {name: one.opened.get(name, "") for name in ("session", "secret")}
    for i in range(draw.randrange(1, 4)):
        secret = known["secret"] if draw.random() < 0.7 else "0" * 32
        other = Talk(url, type="resume", **(known | {"secret": secret}))
        with suppress(WebSocketException):
            one.send(message(draw))
        if i % 2:
            one.end(draw)
        one = other
    one.end(draw)


def changed(url, draw):
    """A valid message with one thing changed, as JSON or in its bytes."""
    one = Talk(url, type="open", plan="live") if draw.random() < 0.7 else Talk(url)
    for _ in range(draw.randrange(1, 5)):
        told = draw.choice((message, opening))(draw)
        if told["type"] == "open" and draw.random() < 0.3:
            told["image"] = _image(draw)
        name = draw.choice(list(told))
        text = json.dumps(told)
        match draw.randrange(8):
            case 0:
                text = json.dumps(told | {name: draw.choice(ODD)})
            case 1:
                text = json.dumps(
                    told | {draw.choice(["", "log", "Type", "look", name + "s"]): draw.choice(ODD)}
                )
            case 2:  # a key that is there twice
                text = text[:-1] + f', "{name}": {json.dumps(draw.choice(ODD))}}}'
            case 3:
                text = text.replace(":", ":" + "[" * draw.choice((1, 60, 3000)), 1)
            case 4:
                at = draw.randrange(len(text))
                text = (
                    text[:at] + draw.choice('"{}[],:\\e\x00\u00e9') + text[at + draw.randrange(2) :]
                )
            case 5:
                text = draw.choice(("\ufeff", " " * 60_000, "//\n", "[")) + text
            case 6:
                text = text.replace(
                    '"id": 0', '"id": ' + draw.choice(("1" * 5000, "1.0", "1e0", "-0", "0x1"))
                )
            case 7:
                text = text.encode()
        one.send(text)
    one.until("chunk", 0.3)
    one.end(draw)


def log(url, draw):
    """An action log of the server's own, with something changed."""
    one = Talk(url, type="open", plan="live", pace="free")
    one.until("chunk")
    one.send({"type": "log"})
    found = one.until("log").get("log")
    if found:
        steps = draw.choice([
            [draw.choice("wasdqe.") for _ in range(40)], [["w", "a red room"]] * 9, ["w"] * 5000,
            [draw.choice(ODD)], [["w"]], [["w", "\x01"]], "wwww", ["wsadqe" * 400],
        ])  # fmt: skip
        head = dict(found["opening"])
        head[draw.choice(list(head))] = draw.choice([*ODD, plan(draw), 5, 256, "dense", "lossless"])
        sent = found | {"steps": steps} | ({"opening": head} if draw.random() < 0.6 else {})
        kind = draw.choice(("replay", "open"))
        if kind == "open":
            one.end(draw)
            one = Talk(url)
        one.send({"type": kind, "log": sent})
        one.until("chunk", 1)
    one.end(draw)


def request(url, draw):
    """A request at the edges of HTTP."""
    verb = draw.choice(
        ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get", "G\tT"]
    )
    path = draw.choice(PATHS) + draw.choice(
        ("", "?limit=-1", "?" + "a=b&" * 999, "#x", ";x", "%00", "?after=video_0")
    )
    lines = [
        "Host: "
        + draw.choice(("localhost", "localhost:99999", "LOCALHOST", "localhost.", "[::1]", ""))
    ]
    for _ in range(draw.randrange(4)):
        lines.append(draw.choice([
            "Range: bytes=" + draw.choice(("0-", "-1", "5-2", "0-0,1-1," * 200, "0-" + "9" * 40)),
            "Expect: 100-continue", "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c",
            "Upgrade: websocket\r\nConnection: Upgrade", "Content-Length: 0\r\nContent-Length: 5",
            "Content-Length: " + draw.choice(("-1", "+5", "5_0", "\u0665", "0x5", "9" * 40, "5 ")),
            "Accept-Encoding: " + "gzip," * 500, "X: " + "a" * draw.choice((9, 9_000, 70_000)), " folded: x",
            "Cookie: " + "\xff" * 20, "Authorization: Bearer", "Authorization: Basic \xff", "Transfer-Encoding: identity",
            "If-Modified-Since: \x7f", "If-None-Match: *", "Origin: http://localhost", "Sec-WebSocket-Version: 0",
        ]))  # fmt: skip
    body = draw.randbytes(draw.choice((0, 5, 200)))
    ends = draw.choice(("\r\n", "\r\n", "\n"))
    data = ends.join(
        [
            f"{verb} {path} HTTP/{draw.choice(('1.1', '1.1', '1.0', '2.0', '0.9', '9'))}",
            *lines,
            "",
            "",
        ]
    )
    _raw(url, (data.encode("utf-8", "replace") + body) * draw.choice((1, 1, 3)))


def video(url, draw):
    """A request for a video whose fields may just do, and what becomes of it."""
    fields = {"prompt": draw.choice(ODD), "seconds": draw.choice(["0.2", "1e-9", "nan", " 1", "\u0661", 1, "74"]),
              "actions": draw.choice(["w*9", "w*999999999", "*", "w*-1", "w q e", "", "w" * 5000]),
              "plan": plan(draw), "seed": draw.choice(ODD), "size": draw.choice(["1x1", "32x48", "0x0", "x", "48x32"])}  # fmt: skip
    chosen = {name: fields[name] for name in draw.sample(sorted(fields), draw.randrange(1, 4))}
    if draw.random() < 0.5:
        kind, body = "application/json", json.dumps(chosen).encode()
    else:
        kind = "multipart/form-data; boundary=" + draw.choice(("b", "b" * 70, '"b b"'))
        parts = [
            f'--b\r\nContent-Disposition: form-data; name="{k}"{draw.choice(("", "; filename=x"))}\r\n\r\n{v}\r\n'
            for k, v in chosen.items()
        ]
        body = "".join(parts).encode("utf-8", "replace") + b"--b--\r\n"
    head = f"POST /v1/videos HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    told = _raw(url, head.encode() + body)
    if found := re.search(rb'"id":"(video_\w+)"', told):
        path = f"/v1/videos/{found[1].decode()}"
        for verb, more in (("GET", ""), ("GET", "/content"), ("DELETE", ""), ("GET", "")):
            _raw(
                url,
                f"{verb} {path}{more} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode(),
            )


def frames(url, draw):
    """A WebSocket's frames, one by one: cut, fragmented, between pings, with bits that mean nothing."""
    key = base64.b64encode(draw.randbytes(16)).decode()
    head = "\r\n".join([
        "GET /v1/sessions HTTP/1.1", "Host: localhost", "Upgrade: websocket", "Connection: Upgrade",
        f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", f"Sec-WebSocket-Protocol: {SUBPROTOCOL}",
        *["Sec-WebSocket-Extensions: permessage-deflate; server_max_window_bits=" + draw.choice(("8", "15", "99"))] * draw.randrange(2),
        "", "",
    ])  # fmt: skip
    text, sent = json.dumps({"type": "open", "plan": "live"}).encode(), b""
    match draw.randrange(6):
        case 0:  # a byte a fragment, and a ping between
            for i in range(len(text)):
                sent += _frame(
                    1 if i == 0 else 0, text[i : i + 1], fin=i == len(text) - 1, draw=draw
                )
                sent += _frame(9, b"p", draw=draw)
        case 1:
            sent = _frame(
                8,
                struct.pack(">H", draw.choice((0, 999, 1000, 1005, 1015, 3000, 65535))) + b"\xff",
                draw=draw,
            )
        case 2:
            sent = _frame(1, text, draw=draw, bits=draw.choice((1, 2, 4, 7)))
        case 3:  # a fragment that goes on with nothing, or begins before the last has ended
            sent = _frame(draw.choice((0, 1)), text[:9], fin=False, draw=draw) + _frame(
                draw.choice((1, 2)), text, draw=draw
            )
        case 4:
            sent = _frame(1, text, draw=draw) + _frame(
                1, '{"type": "prompt", "text": "\u00e9"}'.encode()[:29], draw=draw
            )
        case 5:
            sent = _frame(draw.choice((3, 11, 15)), text, draw=draw) + _frame(1, text, draw=draw)
    _raw(url, head.encode() + sent[: draw.choice((len(sent), len(sent) // 2))], wait=0.3)


def _frame(kind, data, *, draw, fin=True, bits=0):
    mask, size = draw.randbytes(4), len(data)
    length = bytes([0x80 | size]) if size < 126 else bytes([0x80 | 126]) + struct.pack(">H", size)
    masked = bytes(x ^ mask[i % 4] for i, x in enumerate(data))
    return bytes([(0x80 if fin else 0) | bits << 4 | kind]) + length + mask + masked


def _raw(url, data, wait=ANSWER_S):
    """What is answered to bytes; the connection is then cut."""
    port, told = int(url.rpartition(":")[2]), b""
    with socket.create_connection(("127.0.0.1", port), 20) as plain:
        plain.sendall(data)
        plain.settimeout(wait if b"\r\n\r\n" in data else 0.2)
        with suppress(OSError):
            while (piece := plain.recv(65_536)) and len(told) < 2**20:
                told += piece
                plain.settimeout(0.1)
    if re.match(rb"HTTP/1.1 5(?!03)", told):
        raise AssertionError(f"answered {told[:60]!r} to {data[:200]!r}")
    return told


KINDS = {one.__name__: one for one in (talk, taken, changed, log, request, video, frames)}


def send(url, seed, number):
    """One input; what is wrong with its answer, if anything."""
    draw = random.Random(f"{seed}/{number}")
    kind = draw.choice(list(KINDS))
    try:
        # to be refused, cut off or closed is what an attack should meet
        with suppress(OSError, WebSocketException, TimeoutError):
            KINDS[kind](url, draw)
    except AssertionError as fault:
        return kind, str(fault)
    return kind, ""


class Honest(threading.Thread):
    """A session that plays all the while; all of its frames are kept."""

    def __init__(self, url):
        super().__init__(daemon=True)
        self.talk = Talk(url, type="open", plan="live", seed=7, format="png")
        self.chunks, self.pictures, self.log, self.fault = [], {}, None, ""
        self.start()

    def run(self):
        try:
            for told in self.talk.socket:
                if isinstance(told, bytes):
                    header, file = Header.read(told)
                    self.pictures[header.frame] = file
                    continue
                message = json.loads(told)
                if message["type"] == "chunk":
                    self.chunks.append(message["chunk"])
                elif message["type"] == "log":
                    self.log = message["log"]
                elif message["type"] in ("error", "closed"):
                    self.fault = self.fault or told
        except Exception as fault:
            self.fault = self.fault or repr(fault)

    def goes_on(self):
        """What is wrong with the session; nothing where another chunk comes."""
        before, end = len(self.chunks), time.monotonic() + LATE_S
        with suppress(WebSocketException):  # why, is read
            self.talk.send({"type": "keys", "actions": "wsadqe"[before % 6]})
        while len(self.chunks) == before and not self.fault:
            if time.monotonic() > end:
                return f"no chunk came in {LATE_S:g} s"
            time.sleep(0.01)
        return self.fault

    def is_exact(self):
        """Whether every chunk came, and the last pictures are those of a stream made alone."""
        self.talk.send({"type": "log"})
        while self.log is None and not self.fault:
            time.sleep(0.01)
        steps = [one if isinstance(one, str) else one[0] for one in self.log["steps"]]
        with ts.open(ts.load(MODEL), "live", seed=7) as stream:
            wanted = np.concatenate([stream.step(one or None).frames for one in steps])
        known = [i for i in self.pictures if i < len(wanted)]
        same = all(
            np.array_equal(
                np.asarray(Image.open(io.BytesIO(self.pictures[i])).convert("RGB")), wanted[i]
            )
            for i in known[:: max(1, len(known) // 200)]
        )
        return (
            same and len(known) > len(wanted) // 3 and self.chunks == list(range(len(self.chunks)))
        )


@contextmanager
def serving(folder, frames):
    """The address, process and log of `tachyscope serve`."""
    command = [sys.executable, "-m", "tachyscope", "serve", MODEL, "--port", "0", "--plan", "live",
               "--state", str(folder), "--set", f"session_frames={frames}"]  # fmt: skip
    with (
        tempfile.TemporaryFile("w+") as written,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=written, text=True) as server,
    ):

        def read():
            written.seek(0)
            return written.read()

        try:
            words = (word for line in server.stdout for word in line.split())
            url = next(word for word in words if word.startswith("http")).rstrip("/")
            while _refused(url):
                time.sleep(0.1)
            yield url, server.pid, read
        finally:
            server.terminate()


def _refused(url):
    with suppress(OSError):
        urlopen(f"{url}/health").close()
        return False
    return True


def rss_mb(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def attack(numbers, seed, frames=10**6, on_look=print):
    """Send these inputs, or those until Ctrl-C; what was found."""
    found, kinds, warm = [], Counter(), 0.0
    with tempfile.TemporaryDirectory() as folder, serving(folder, frames) as (url, pid, log):
        honest, read = Honest(url), 0
        with ThreadPoolExecutor(CLIENTS) as clients, suppress(KeyboardInterrupt):
            for begin in range(0, len(numbers), EACH):
                some = numbers[begin : begin + EACH]
                for number, (kind, fault) in zip(
                    some, clients.map(lambda one: send(url, seed, one), some), strict=True
                ):
                    kinds[kind] += 1
                    if fault:
                        found.append(f"{number}: {fault}")
                written, about = log(), f"{some[0]} to {some[-1]}"
                if "Traceback" in written[read:]:
                    found.append(f"{about}: {written[read:][-1500:]}")
                read = len(written)
                if fault := honest.goes_on():
                    found.append(f"{about}: the honest session: {fault}")
                    break
                urlopen(f"{url}/health", timeout=30).close()
                on_look(f"{begin + len(some)} inputs, {len(found)} findings")
                if begin <= len(numbers) // 3:
                    warm = rss_mb(pid)
        grown = rss_mb(pid) - warm
        if grown > GROWN_MB:
            found.append(f"the server grew by {grown:.0f} MB")
        if not honest.fault and not honest.is_exact():
            found.append("the honest session's frames are others than a stream's made alone")
        chunks = len(honest.chunks)
    return {"count": sum(kinds.values()), "kinds": dict(kinds), "chunks": chunks, "opened": OPENED[True],
            "grown_mb": round(grown, 1), "findings": found}  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one input")
    asked = parser.parse_args()
    every = range(asked.count) if asked.only is None else [asked.only]
    result = attack(every, asked.seed)
    for line in result["findings"]:
        print(line)
    print(json.dumps(result))
