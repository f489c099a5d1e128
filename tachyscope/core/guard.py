"""Refuses calls to a stream that is busy, or that was interrupted within a chunk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import TypeVar
from weakref import ref

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.types import Chunk

T = TypeVar("T")

BUSY = (
    "this stream is busy with another call: use it from one thread, call it after the other call "
    "has returned, or open a second stream"
)
INTERRUPTED = (
    "this stream was interrupted within a chunk, and what it would make next is another video: "
    "restore() a snapshot, or open another stream"
)


class Guard:
    """Lets one call run at a time, and none after an unfinished one until a state is restored.

    A second call is refused instead of blocked: it is a mistake, and a re-entrant one would
    deadlock. `interrupted` is set before the first change and cleared after the last, so that an
    exception or Ctrl-C anywhere between leaves it set.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self.rollout: ref[Generator[Chunk]] | None = None  # the loop that advances the stream
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raise if a call would be refused."""
        if self._lock.locked():
            raise TachyscopeError(BUSY)
        if self.interrupted:
            raise TachyscopeError(INTERRUPTED)

    def check_free(self) -> None:
        """Raise if a rollout is playing the stream: it may be a chunk ahead of what it yielded."""
        chunks = None if self.rollout is None else self.rollout()
        if chunks is not None and chunks.gi_frame is not None:  # type: ignore[attr-defined]
            raise TachyscopeError(
                "this stream is being played by another rollout: go through that to its end, or "
                "close() it, or open a second stream"
            )

    def alone(self, work: Callable[[], T], interrupted: bool = False) -> T:
        """Run `work` exclusively; `interrupted`: also after an unfinished call."""
        if self._lock.locked():
            raise TachyscopeError(BUSY)
        # `with`, since Ctrl-C could come between acquire() and a try block. If two threads find the
        # lock free at once, one waits for the other's call
        with self._lock:
            if self.interrupted and not interrupted:
                raise TachyscopeError(INTERRUPTED)
            return work()

    def change(self, work: Callable[[], T]) -> T:
        """Within `alone`: run `work`, which leaves the stream interrupted if it does not finish."""
        self.interrupted = True
        done = work()
        self.interrupted = False
        return done
