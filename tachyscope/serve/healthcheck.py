"""A health check that opens a session and waits for its first picture.

    python -m tachyscope.serve.healthcheck [URL] [TOKEN_FILE]

The exit code is 0 if a picture comes or all session slots are taken, else 1 with one line of why.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from websockets.exceptions import WebSocketException
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from tachyscope.serve.protocol import SUBPROTOCOL

URL = "http://127.0.0.1:8080"
WITHIN_S = 25.0  # a Docker health check's own limit is 30 s
FULL = 503  # the code of a refusal without a free slot


def fault(url: str = URL, token: str = "", within_s: float = WITHIN_S) -> str:
    """Why a server does not play; empty if it does."""
    until = time.monotonic() + within_s
    offered = [Subprotocol(SUBPROTOCOL)] + [Subprotocol(f"bearer.{token}")] * bool(token)
    address = "ws" + url.removeprefix("http").rstrip("/") + "/v1/sessions"
    try:
        with connect(address, subprotocols=offered, open_timeout=within_s, close_timeout=2) as one:
            # a bank would take host memory for a check
            one.send(json.dumps({"type": "open", "plan": "live"}))
            while True:
                event = one.recv(timeout=max(0.0, until - time.monotonic()))
                if isinstance(event, bytes):  # a picture; nothing of the session is kept
                    one.send(json.dumps({"type": "close"}))
                    continue
                message = json.loads(event)
                if message["type"] == "closed":
                    return ""
                if message["type"] == "error":
                    return "" if message["code"] == FULL else str(message["message"])
    except TimeoutError:
        return f"no picture came in {within_s:g} s"
    except (OSError, WebSocketException) as fault:
        return f"{url} does not answer ({str(fault) or type(fault).__name__})"


def main(url: str = URL, token_file: str = "") -> int:
    """The exit code of a check; where there is no such file the server needs no token."""
    file = Path(token_file)
    why = fault(url, file.read_text().split()[0] if file.is_file() else "")
    if why:
        print(f"tachyscope: {why}", file=sys.stderr)
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
