"""How fast a rollout is by the wall clock, with its warm-up kept apart.

`generate`, `compare`, `bench` and reports all take their rates from here. Rates count the frames
of whole chunks: a last chunk that is cut to the wanted length takes as long as any other.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence

from tachyscope.core.types import Chunk
from tachyscope.io.programs import count_programs

WARM_CHUNKS = 2  # the first has no past, so a policy may do its first work in the second
LAST_CHUNKS = 5  # over which the rate at the end is taken

Row = Mapping[str, float]


class Clock:
    """Writes into each chunk's row its time `wall_ms`, decoding included, and the number of
    `programs` that were compiled for it.

    Only time inside `with clock:` counts. Around a whole rollout it is the time from one chunk to
    the next, and for the first chunk the time to the first frame.
    """

    def __init__(self) -> None:
        self._spent = 0.0
        self._since: float | None = None
        self._programs = 0

    def __enter__(self) -> Clock:
        self._since, self._programs = time.perf_counter(), count_programs()
        return self

    def __exit__(self, *fault: object) -> None:
        assert self._since is not None
        self._spent += time.perf_counter() - self._since
        self._since = None

    def lap(self, chunk: Chunk) -> None:
        """Note that a chunk is done."""
        now = time.perf_counter()
        spent = self._spent + (0.0 if self._since is None else now - self._since)
        chunk.stats["wall_ms"] = 1e3 * spent
        programs = count_programs()
        if programs > self._programs:
            chunk.stats["programs"] = float(programs - self._programs)
        self._spent, self._since = 0.0, None if self._since is None else now
        self._programs = programs


def warm_up(rows: Sequence[Row]) -> int:
    """How many of a rollout's first chunks belong to the warm-up.

    At least two. Beyond them, those before a CUDA graph is replayed; without one, those before the
    first two chunks with equally long pasts, since a bounded cache fills until then.
    """
    later = range(WARM_CHUNKS, len(rows))
    replayed = [i for i in later if rows[i].get("cuda_graph")]
    alike = [
        i
        for i in later
        if i + 1 < len(rows) and rows[i]["entries_before"] == rows[i + 1]["entries_before"]
    ]
    return (replayed or alike or [WARM_CHUNKS])[0]


def rates(rows: Sequence[Row], warm: int | None = None) -> dict[str, float]:
    """The speed of a rollout, from its rows as a Clock timed them.

    first_frame_s: until the first decoded frame. warm_chunks, warm_s: the warm-up, first chunk
    included.
    steady_chunks: those after it; without any, the following keys are left out.
    steady_ms: their median time; p99_ms: their 99th percentile, of fewer than 100 chunks the
    longest; model_ms: the median time of the model's passes, without decoding.
    recompiled: programs that were compiled after the warm-up.
    fps_steady: frames a second by steady_ms. fps_end: by the last of these chunks.
    fps_avg: by all chunks, warm-up included.
    warm: chunks of warm-up, for runs that are compared over the same chunks.
    """
    warm = min(warm_up(rows) if warm is None else warm, len(rows))
    wall = [row["wall_ms"] for row in rows]
    values = {
        "first_frame_s": wall[0] / 1e3,
        "warm_chunks": warm,
        "warm_s": sum(wall[:warm]) / 1e3,
        "steady_chunks": len(rows) - warm,
        "fps_avg": frame_rate(sum(row["frames_made"] for row in rows), sum(wall)),
    }
    if warm < len(rows):
        made = statistics.median(row["frames_made"] for row in rows[warm:])
        values["recompiled"] = sum(row.get("programs", 0.0) for row in rows[warm:])
        values["steady_ms"] = statistics.median(wall[warm:])
        values["p99_ms"] = sorted(wall[warm:])[math.ceil(0.99 * (len(rows) - warm)) - 1]
        values["model_ms"] = statistics.median(row["chunk_ms"] for row in rows[warm:])
        values["fps_steady"] = frame_rate(made, values["steady_ms"])
        values["fps_end"] = frame_rate(made, statistics.median(wall[warm:][-LAST_CHUNKS:]))
    return values


def tell_rates(name: str, speeds: Mapping[str, float], load_s: float) -> str:
    """A run's rates and its warm-up, in a sentence."""
    before = (
        f"{speeds['fps_avg']:.1f} on average; loading {load_s:.1f} s, first frame after "
        f"{speeds['first_frame_s']:.1f} s, warm-up {speeds['warm_s']:.1f} s "
        f"({speeds['warm_chunks']:.0f} chunks)."
    )
    if "fps_steady" not in speeds:
        return f"{name}: too short for a steady rate, frames/s are {before}"
    return (
        f"{name}: {speeds['fps_steady']:.1f} frames/s once warm ({speeds['steady_ms']:.1f} ms a "
        f"chunk, p99 {speeds['p99_ms']:.1f}, {speeds['model_ms']:.1f} in the model), "
        f"{before}"
    )


def frame_rate(frames: float, ms: float) -> float:
    """Frames a second."""
    return 1e3 * frames / ms
