"""Which latent frames a forward pass of a video model goes over."""

from __future__ import annotations

import operator
from typing import NamedTuple, Self

from tachyscope.core.errors import TachyscopeError


class ForwardPass(NamedTuple):
    """The arguments of `VideoCache.begin`."""

    frame: int
    frames: int
    grid: tuple[int, int]
    noise: float
    past: bool

    @classmethod
    def of(cls, frame: int, frames: int, grid: tuple[int, int], noise: float, past: bool) -> Self:
        """A pass of checked, plain integers."""
        try:
            start, count, rows, columns = (operator.index(n) for n in (frame, frames, *grid))
            fits = start >= 0 and min(count, rows, columns) >= 1
        except (TypeError, ValueError):
            fits = False
        if not fits:
            raise TachyscopeError(
                f"begin takes whole numbers, frame from 0, frames and both sides of grid from 1, "
                f"got frame={frame!s:.40}, frames={frames!s:.40}, grid={grid!s:.40}"
            )
        return cls(start, count, (rows, columns), noise, past)

    @property
    def end(self) -> int:
        return self.frame + self.frames

    @property
    def tokens(self) -> int:
        return self.frames * self.grid[0] * self.grid[1]
