"""Refuses calls of a stream that is busy, or that was interrupted in the midst of a chunk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import TypeVar
from weakref import ref

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.types import Chunk

T = TypeVar("T")

BUSY = (
    "this stream is in the midst of another call: use it from one thread, call it when that has "
    "returned, or open a second stream"
)
INTERRUPTED = (
    "this stream was interrupted in the midst of a chunk, and what it would make next is another "
    "video: restore() a snapshot, or open another stream"
)


class Guard:
    """One call at a time, and none after one that did not end until a snapshot is restored.

    A call is refused rather than made to wait: a second one comes by mistake, and one that comes
    from within the first would wait for ever. `interrupted` is set before anything changes, and
    taken back after the last change, so that an exception or Ctrl-C anywhere between leaves it set.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self.rollout: ref[Generator[Chunk]] | None = None  # the loop that advances the stream
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raise where a call would be refused."""
        if self._lock.locked():
            raise TachyscopeError(BUSY)
        if self.interrupted:
            raise TachyscopeError(INTERRUPTED)

    def check_free(self) -> None:
        """Raise where a rollout goes on, which may be a chunk ahead of what it yielded."""
        chunks = None if self.rollout is None else self.rollout()
        if chunks is not None and chunks.gi_frame is not None:  # type: ignore[attr-defined]
            raise TachyscopeError(
                "this stream is being played by another rollout: go through that to its end, or "
                "close() it, or open a second stream"
            )

    def alone(self, work: Callable[[], T], interrupted: bool = False) -> T:
        """Do work that no other call may come between; `interrupted`: also after such a one."""
        if self._lock.locked():
            raise TachyscopeError(BUSY)
        # the lock's own `with`: Ctrl-C cannot come between taking it and the block that frees it.
        # Of two threads that both find it free, one waits for the other's whole call
        with self._lock:
            if self.interrupted and not interrupted:
                raise TachyscopeError(INTERRUPTED)
            return work()

    def change(self, work: Callable[[], T]) -> T:
        """Within `alone`: do work that leaves the stream interrupted if it does not end."""
        self.interrupted = True
        done = work()
        self.interrupted = False
        return done
