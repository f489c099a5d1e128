"""One rollout of a comparison: its rows, its frames on disk, and their quality."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import IO

import numpy as np
import torch

from tachyscope.core.meter import summary
from tachyscope.core.opening import open_request
from tachyscope.core.plan import Plan
from tachyscope.core.request import VideoRequest
from tachyscope.core.rollout import rollout
from tachyscope.core.stream import Stream
from tachyscope.core.types import Chunk
from tachyscope.io.machine import count_peak, peak_gb
from tachyscope.measure.plan_notes import notes
from tachyscope.measure.progress import Progress
from tachyscope.measure.quality import Frames, Quality
from tachyscope.measure.rates import Clock
from tachyscope.measure.runs import Run
from tachyscope.models.atrium.visit import Seen
from tachyscope.models.base import VideoModel

Watch = Callable[[str, Chunk], None]
Truth = Callable[[int, int], np.ndarray]
Judge = Callable[[Frames, int], Seen]


class Store:
    """Frames of one size on disk, so that those of several runs need not be in memory."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._size: tuple[int, ...] = ()
        self.frames = 0

    def add(self, frames: Frames) -> None:
        self._size = frames.shape[1:]
        self._file.seek(0, 2)
        self._file.write(frames.tobytes())
        self.frames += len(frames)

    def read(self) -> Frames:
        """All frames so far [F, H, W, 3], mapped from disk."""
        self._file.flush()
        shape = (self.frames, *self._size)
        # the map stays valid when the file is closed
        return np.memmap(self._file, np.uint8, "r", shape=shape)


@dataclass(eq=False)
class Take:
    """A rollout that is opened, made chunk by chunk, and measured."""

    name: str
    plan: Plan | str
    model: VideoModel
    request: VideoRequest  # of one video
    frames: int
    store: Store
    against: str = "dense"  # the baseline's name in keys
    rows: list[dict[str, float]] = field(default_factory=list)  # of the meter
    looks: list[dict[str, float]] = field(default_factory=list)  # of the frames, for the plots
    wrong: list[np.ndarray] = field(default_factory=list)  # a frame's wrong pixels, packed
    right: list[tuple[int, int]] = field(default_factory=list)  # surfaces right and judged, a chunk
    warm_s: float = 0.0

    def __post_init__(self) -> None:
        self.near, self.true = Quality(against=self.against), Quality(against="truth")
        self.clock = Clock()
        self.stream: Stream | None = None
        self.more: dict[str, float] = {}

    def open(self, like: Take | None = None, progress: Progress | None = None) -> None:
        """Read prompt and given frames, or copy the state of `like`, a take of an equal plan."""
        count_peak(self.model.device)
        begun = time.perf_counter()
        if like is not None and like.stream is not None:
            request = replace(self.request, first=None, first_actions="")
            self.stream = open_request(self.model, self.plan, request)
            self.stream.restore(like.stream.snapshot())
        else:
            first = self.request.first
            count = len(first) if isinstance(first, np.ndarray) else 0
            observers = [] if progress is None else progress.reading(self.name, count)
            self.stream = open_request(self.model, self.plan, self.request, observers)
            for observer in observers:
                self.stream.session.unwatch(observer)
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        self.more["open_s"] = time.perf_counter() - begun
        # when runs take turns, a chunk must not be launched ahead of its turn
        self.chunks: Generator[Chunk] = rollout(
            self.model, frames=self.frames, actions=self.request.actions, stream=self.stream,
            overlap_decode=self.model.device.type == "cuda",
        )  # fmt: skip

    @property
    def done(self) -> bool:
        return self.store.frames >= self.frames

    def step(self, watch: Watch | None, timed: bool = True) -> None:
        """Make another chunk; `timed` unless a clock already runs around all of them."""
        with self.clock if timed else nullcontext():
            chunk = next(self.chunks)
        self.clock.lap(chunk)
        self.rows.append(chunk.stats)
        self.store.add(chunk.frames)
        if watch is not None:
            watch(self.name, chunk)

    def close(self) -> None:
        """Free the stream; the numbers stay."""
        if self.model.device.type == "cuda":
            self.more["peak_gb"] = peak_gb(self.model.device)
        assert self.stream is not None
        self.chunks.close()
        self.plan_text, self.notes = (
            str(self.stream.session.plan),
            notes(self.stream.session, self.rows),
        )
        self.past_is_whole = (
            not self.stream.session.plan.cache.grows
            and self.stream.session.memory.past == self.stream.session.memory.total_entries
        )
        self.stream.close()

    def look(self, baseline: Take, truth: Truth | None, judge: Judge | None) -> None:
        """Measure the new chunks, as far as the baseline has them too."""
        whole = self.store.read()
        theirs = whole if baseline is self else baseline.store.read()
        start = self.near.frames
        while len(self.looks) < len(self.rows):
            stop = start + round(self.rows[len(self.looks)]["frames"])
            if stop > len(theirs):
                return
            frames = np.asarray(whole[start:stop])
            other = None if baseline is self else np.asarray(theirs[start:stop])
            look = self.near.add(frames, other)
            if truth is not None:
                look |= self.true.add(frames, truth(start, stop))
            if judge is not None:
                seen = judge(frames, start)
                self.wrong += [np.packbits(mask) for mask in seen.wrong]
                self.right.append((seen.right, seen.judged))
                look["surfaces_right"] = seen.right / max(1, seen.judged)
            self.looks.append(look)
            start = stop

    def wrong_of(self, frame: int) -> np.ndarray | None:
        """The pixels of a frame that show a wrong surface, bool [H, W]; None without a judge."""
        if not self.wrong:
            return None
        height, width = self.store.read().shape[1:3]
        return np.unpackbits(self.wrong[frame], count=height * width).reshape(height, width) > 0

    def run(self, more: Mapping[str, float]) -> Run:
        """The finished rollout for a table and a report."""
        looks = self.near.summary()
        if self.true.frames:
            looks["psnr_truth"] = self.true.summary()["psnr_truth"]
        if self.right:
            judged = sum(count for _, count in self.right)
            looks["surfaces_right"] = sum(right for right, _ in self.right) / max(1, judged)
        stats = summary(self.rows) | looks | self.more | dict(more)
        stats["warm_s"] += self.warm_s
        seen = [row | look for row, look in zip(self.rows, self.looks, strict=True)]
        return Run(self.name, self.plan_text, seen, stats, self.notes)
