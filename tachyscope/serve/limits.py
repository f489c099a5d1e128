"""The most that clients may ask of a server, and how fast."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields

from tachyscope.core.errors import TachyscopeError


@dataclass(frozen=True)
class Limits:
    """The most that clients may ask of a server; docs/serve.md explains each."""

    sessions: int = 16  # open at once; one without a client gives its slot to a new one
    session_frames: int = 3_600  # of one session; also what an unbounded cache is reserved for
    prompt_letters: int = 2_000
    message_bytes: int = 65_536  # of a message, and of the body of a request
    log_bytes: int = 1_048_576  # of a message that carries an action log
    messages_per_s: int = 60  # of one client, on average; twice as many at once
    faults: int = 20  # malformed messages of one connection
    idle_s: float = 300.0  # without a message of the client's
    connections: int = 512  # open at once, WebSockets included
    connections_per_address: int = 64
    request_s: float = 10.0  # from a connection's or request's beginning to its last byte
    send_s: float = 15.0  # that a client may leave a message unread
    kept_s: float = 3_600.0  # that a session waits on disk for its client
    kept: int = 64  # sessions on disk beside the open ones; the oldest go first
    jobs: int = 32  # videos that wait, are made or are kept
    job_frames: int = 1_200

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise TachyscopeError(
                    f"limit {field.name} must be over 0, got {getattr(self, field.name)}"
                )


class Bucket:
    """Lets through `rate` a second on average, and twice as many at once after a rest."""

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = rate, clock
        self._left, self._since = 2 * rate, clock()

    def take(self, cost: float = 1.0) -> bool:
        """Whether so much more may pass now."""
        now = self._clock()
        self._left = min(2 * self._rate, self._left + (now - self._since) * self._rate)
        self._since = now
        if self._left < cost:
            return False
        self._left -= cost
        return True
