"""Runs side by side in true relative time: each lane shows the frames made by that moment."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from tachyscope.io.video import BACKGROUND, beside
from tachyscope.measure.quality import Frames
from tachyscope.measure.rates import LAST_CHUNKS, frame_rate

FPS = 25  # of the video, for any model
LONGEST = 20.0  # seconds of the video; longer runs are shown faster
HOLD = 2.0  # seconds that the last picture is shown
A_ROW = 4  # lanes beside each other; others are below
SHORT_SIDE = 256  # pixels: a smaller video is enlarged to about that
WRONG = np.array([214, 40, 40], np.float32)  # over surfaces that are shown wrong

Row = dict[str, float]


@dataclass(frozen=True)
class Lane:
    """A run, and the time at which each of its chunks and frames was ready."""

    name: str
    rows: Sequence[Row]
    frames: Frames  # [F, H, W, 3]
    wrong: Callable[[int], np.ndarray | None] = lambda frame: None  # a frame's wrong pixels [H, W]
    right: Sequence[tuple[int, int]] = ()  # surfaces right and judged, a chunk
    gpu: bool = False
    given: Frames | None = None  # [1, H, W, 3], the frame that the video continues, shown first

    @cached_property
    def chunk_s(self) -> list[float]:
        """Seconds after the start at which each chunk was decoded."""
        return [ms / 1e3 for ms in accumulate(row["wall_ms"] for row in self.rows)]

    @cached_property
    def frame_s(self) -> list[float]:
        """Seconds after the start at which each frame is shown.

        A chunk's first frame is shown when the chunk is decoded, the others spread over the time
        until the next one is; those of the last chunk over the time that it took itself.
        """
        took = [row["wall_ms"] / 1e3 for row in self.rows]
        spans = [*took[1:], took[-1]]
        return [
            end + span * i / row["frames"]
            for end, span, row in zip(self.chunk_s, spans, self.rows, strict=True)
            for i in range(round(row["frames"]))
        ]

    @cached_property
    def before(self) -> Frames:
        """The picture shown before the first frame; blank if none was given."""
        return blank(self.frames) if self.given is None else self.given

    def caption(self, seconds: float) -> str:
        """Three lines under the lane at that time: frames/s, memory, and surfaces right."""
        there = bisect_right(self.chunk_s, seconds)
        if not there:
            return "\n\n"
        row = self.rows[there - 1]
        newest = self.rows[max(0, there - LAST_CHUNKS) : there]
        if there == len(self.rows):
            newest = self.rows
        rate = frame_rate(
            sum(one["frames_made"] for one in newest), sum(one["wall_ms"] for one in newest)
        )
        ended = f", done in {self.chunk_s[-1]:.1f} s" if there == len(self.rows) else ""
        lines = [f"{rate:.1f} frames/s{ended}", memory(row, self.gpu), ""]
        if self.right:
            right, judged = (sum(x) for x in zip(*self.right[:there], strict=True))
            lines[2] = f"{right / max(1, judged):.0%} of surfaces right"
        return "\n".join(lines)

    def picture(self, frame: int) -> Frames:
        """A frame [1, H, W, 3] with wrong surfaces hatched in red; the given frame for -1."""
        if frame < 0:
            return self.before
        shown = np.asarray(self.frames[frame : frame + 1])
        wrong = self.wrong(frame)
        if wrong is None or not wrong.any():
            return shown
        high, wide = wrong.shape
        y, x = np.ogrid[:high, :wide]
        step = max(4, high // 16)
        stripes = (x + y) % step < max(1, step // 4)
        share = np.where(stripes, 0.85, 0.12)[..., None] * wrong[..., None]
        marked: Frames = ((1 - share) * shown + share * WRONG).round().astype(np.uint8)
        return marked


def blank(like: Frames) -> Frames:
    """A frame [1, H, W, 3] of background, as large as those of `like`."""
    frame = np.empty((1, *like.shape[1:]), np.uint8)
    frame[:] = list(bytes.fromhex(BACKGROUND[1:]))
    return frame


def memory(row: Row, gpu: bool) -> str:
    """The memory of a run's cache, on the GPU and in RAM."""
    held = f"cache {size(row['cache_mb'])}"
    if gpu:
        held += " on the GPU"
    if host := row.get("host_mb"):
        held += f" + {size(host)} in RAM"
    return held


def size(mb: float) -> str:
    """Megabytes in words."""
    if mb >= 1e3:
        return f"{mb / 1e3:.1f} GB"
    return f"{mb:.0f} MB" if mb >= 10 else f"{mb:.1f} MB"


def speed_of(lanes: Sequence[Lane]) -> float:
    """The factor by which the video is faster than the runs, so that it lasts at most LONGEST."""
    return max(1.0, max(lane.chunk_s[-1] for lane in lanes) / LONGEST)


def pictures(lanes: Sequence[Lane], speed: float, truth: Frames | None = None) -> Iterator[Frames]:
    """The video's frames [1, H, W, 3], FPS a second: all lanes by one clock, `speed` times as fast.

    truth: true frames, shown in a lane of their own that keeps up with the fastest run.
    """
    scale = max(1, SHORT_SIDE // min(lanes[0].frames.shape[1:3]))
    last = max(max(lane.chunk_s[-1], lane.frame_s[-1]) for lane in lanes)
    before, picture = None, None
    for i in range(math.ceil((last / speed + HOLD) * FPS)):
        seconds = i / FPS * speed
        shown = [bisect_right(lane.frame_s, seconds) - 1 for lane in lanes]
        captions = [lane.caption(seconds) for lane in lanes]
        if (shown, captions) != before or picture is None:
            before = shown, captions
            picture = _grid(lanes, shown, captions, scale, truth)
        yield picture


def _grid(
    lanes: Sequence[Lane],
    shown: Sequence[int],
    captions: Sequence[str],
    scale: int,
    truth: Frames | None,
) -> Frames:
    """One picture of all lanes, and of the truth as far as the fastest lane is."""
    videos = [lane.picture(i) for lane, i in zip(lanes, shown, strict=True)]
    labels, below = [lane.name for lane in lanes], list(captions)
    if truth is not None:
        newest = max(shown)
        true = lanes[0].before if newest < 0 else np.asarray(truth[newest : newest + 1])
        videos = [true, *videos]
        labels, below = ["truth", *labels], ["\n\n", *below]
    rows = math.ceil(len(videos) / A_ROW)
    columns = math.ceil(len(videos) / rows)
    missing = rows * columns - len(videos)
    videos += [blank(videos[0])] * missing
    labels += [""] * missing
    below += ["\n\n"] * missing
    parts = [
        beside(videos[i:stop], labels[i:stop], scale=scale, captions=below[i:stop])
        for i, stop in ((k * columns, (k + 1) * columns) for k in range(rows))
    ]
    return np.concatenate(parts, 1)
