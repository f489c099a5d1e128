"""Plain clients of a server: bytes over a socket, and a session over a real WebSocket."""

import socket
from contextlib import closing, contextmanager

from serving import Player
from websockets.sync.client import connect

from tachyscope.serve import protocol


def raw(url, source="127.0.0.1"):
    """A plain connection to a server."""
    port = int(url.rpartition(":")[2])
    return closing(socket.create_connection(("127.0.0.1", port), 20, (source, 0)))


@contextmanager
def play(url):
    """A session over a real WebSocket."""
    address = url.replace("http", "ws") + "/v1/sessions"
    options = {"subprotocols": [protocol.SUBPROTOCOL], "max_size": None, "close_timeout": 0.5}
    with connect(address, **options) as plain:
        player = Player(Words(plain))
        player.send("open", format="png", pace="free")
        player.opened = player.until("opened")
        yield player


class Words:
    """A WebSocket of the package websockets, with the words of Starlette's test client."""

    def __init__(self, plain):
        self.plain, self.send_text = plain, plain.send

    def receive(self):
        message = self.plain.recv(timeout=60)
        return {"type": "", "text" if isinstance(message, str) else "bytes": message}


def head(first, *lines):
    return "\r\n".join([f"{first} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode()


def answer(plain):
    """All that the server says until it closes."""
    data = b""
    try:
        while piece := plain.recv(65_536):
            data += piece
    except ConnectionResetError:
        pass
    return data
