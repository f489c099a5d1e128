"""An mp4 of a session's frames, while it is played."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np

from tachyscope.errors import TachyscopeError


class Recording:
    """A file that grows by chunks, up to `most` frames; it is there once it is finished."""

    def __init__(self, path: Path, fps: float, most: int) -> None:
        from tachyscope.video import VideoWriter  # PyAV is loaded when somebody records

        self._most = most
        self._writer = VideoWriter(path, fps, background=True)
        self._writer.__enter__()

    def write(self, frames: np.ndarray) -> None:
        left = self._most - self._writer.frames
        if left > 0:
            self._writer.write(frames[:left])

    def finish(self) -> int:
        """The frames of the file; raises where there are none."""
        self._writer.__exit__(None, None, None)
        return self._writer.frames

    def discard(self) -> None:
        fault = TachyscopeError("a recording that nobody wants")
        with suppress(TachyscopeError):
            self._writer.__exit__(type(fault), fault, None)
