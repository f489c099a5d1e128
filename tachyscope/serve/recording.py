"""An mp4 of a session's frames, while it is played."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from tachyscope.core.errors import TachyscopeError

NOT_RECORDED = "recording_failed"  # the code of a notice: the file cannot be written


class Recording:
    """An mp4 of at most `most` frames; the file appears when it is finished.

    Its errors name no path of the server, since clients get them.
    """

    def __init__(self, path: Path, fps: float, most: int) -> None:
        from tachyscope.io.video import VideoWriter  # PyAV is loaded when somebody records

        self._most = most
        self._writer = VideoWriter(path, fps, background=True)
        with _without_paths():
            self._writer.__enter__()

    def write(self, frames: np.ndarray) -> None:
        left = self._most - self._writer.frames
        if left > 0:
            with _without_paths():
                self._writer.write(frames[:left])

    def finish(self) -> int:
        """Finish the file; returns its number of frames, and raises without any."""
        with _without_paths():
            self._writer.__exit__(None, None, None)
        return self._writer.frames

    def discard(self) -> None:
        fault = TachyscopeError("a recording that nobody wants")
        with suppress(TachyscopeError):
            self._writer.__exit__(type(fault), fault, None)


@contextmanager
def _without_paths() -> Iterator[None]:
    try:
        yield
    except TachyscopeError as fault:
        cause = fault.__cause__
        if not isinstance(cause, OSError):
            raise TachyscopeError("the recording has no frames: let one be made first") from fault
        reason = (cause.strerror or "no reason given").lower()
        raise TachyscopeError(f"the recording cannot be written ({reason})") from fault
