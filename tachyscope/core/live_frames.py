"""A bounded queue of camera frames: when it is full, the oldest frame is dropped."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Self

from tachyscope.core.errors import TachyscopeError

WAIT = 10.0  # seconds without a frame


class LiveFrames:
    """An iterator over frames that another thread puts in.

    At most `most` frames wait, which bounds the delay behind the camera.
    """

    def __init__(self, most: int, name: str = "the camera") -> None:
        self.name = name
        self.dropped = 0  # frames dropped since `count_dropped`
        self._waiting: deque[Any] = deque(maxlen=most)
        self._changed = threading.Condition()
        self._closed = False
        self._fault: BaseException | None = None

    def __len__(self) -> int:
        """How many frames wait."""
        return len(self._waiting)

    def put(self, frame: Any) -> None:
        """Append a frame; if the queue is full, the oldest is dropped."""
        with self._changed:
            self.dropped += len(self._waiting) == self._waiting.maxlen
            self._waiting.append(frame)
            self._changed.notify()

    def count_dropped(self) -> int:
        """How many frames were dropped since the last call."""
        with self._changed:
            dropped, self.dropped = self.dropped, 0
        return dropped

    def feed(self, frames: Iterable[Any]) -> Self:
        """Put these frames in from a new thread, until the queue is closed."""

        def run() -> None:
            try:
                for frame in frames:
                    if self._closed:
                        return
                    self.put(frame)
            except BaseException as fault:
                self._fault = fault
            self.close()

        threading.Thread(target=run, name="tachyscope camera", daemon=True).start()
        return self

    def close(self) -> None:
        """End the queue; frames that wait can still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self._changed:
            there = self._changed.wait_for(lambda: self._waiting or self._closed, WAIT)
            if self._waiting:
                return self._waiting.popleft()
        if self._fault is not None:
            raise self._fault
        if not there:
            raise TachyscopeError(
                f"{self.name} gave no frame for {WAIT:.0f} seconds: see that it runs, and open "
                f"the stream again"
            )
        raise StopIteration
