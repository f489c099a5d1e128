"""Plans against dense, by turns: whole rollouts, or single chunks after given lengths."""

from __future__ import annotations

import random
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tachyscope.core.arguments import parse_plan
from tachyscope.core.errors import TachyscopeError, shown
from tachyscope.core.limits import check
from tachyscope.core.meter import summary
from tachyscope.core.opening import open_request
from tachyscope.core.plan import Plan
from tachyscope.core.request import VideoRequest
from tachyscope.core.rollout import rollout
from tachyscope.core.stream import Stream
from tachyscope.io.machine import count_peak, peak_gb
from tachyscope.io.results import Document, document, size_of
from tachyscope.io.tables import Column, table
from tachyscope.measure.fill import fill
from tachyscope.measure.noise import noise, speed_word, verdict
from tachyscope.measure.plan_notes import notes
from tachyscope.measure.rates import WARM_CHUNKS, Clock, frame_rate, rates, warm_up
from tachyscope.models.base import VideoModel

PROMPT = "a red room"


def bench(
    model: VideoModel,
    plans: Sequence[str] = ("fast", "balanced"),
    *,
    frames: int = 48,
    rounds: int = 5,
    command: str = "",
    watch: Callable[[int], None] | None = None,
) -> Document:
    """Time plans against dense, and dense against itself, by turns; a results document.

    Chunks after the longest warm-up of any plan are compared. `ratio_dense` is the median over
    rounds of their time by dense / by the plan, `ratio_dense_all` that of whole rollouts. `aa` is
    the widest ratio, taken both ways, that the same clock gave two equal runs; `real` holds where
    every round's ratio lies outside it on one side. `watch` is called with the rounds done.
    """
    check("rounds", rounds)
    request = VideoRequest(frames=frames, prompt=PROMPT)
    turns = _turns(model, plans)
    for _, plan in turns:
        # a plan that cannot run is refused before any is timed
        open_request(model, plan, request)
    for _, plan in turns:
        warm(model, plan, request)
    takes: list[list[_Take]] = [[] for _ in turns]
    shuffle = random.Random(0)
    for done in range(rounds):
        # neighbours share the machine's load, so the two dense runs must not always be neighbours
        for i in shuffle.sample(range(len(turns)), len(turns)):
            takes[i].append(_timed(model, turns[i][1], request, frames))
        if watch is not None:
            watch(done + 1)
    start = max(warm_up(of_plan[0].rows) for of_plan in takes)
    times = [[take.ms(start) for take in of_plan] for of_plan in takes]
    aa = noise(times[0], times[1])
    rows = [_row(turns[0], takes[0], model, start)]
    for turn, of_plan, ms in zip(turns[2:], takes[2:], times[2:], strict=True):
        ratios = [a / b for a, b in zip(times[0], ms, strict=True)]
        whole = [a.ms() / b.ms() for a, b in zip(takes[0], of_plan, strict=True)]
        row = _row(turn, of_plan, model, start) | verdict(ratios, aa)
        rows.append(row | {"ratio_dense_all": statistics.median(whole)})
    return document(f"bench-{model.device.type}", rows, command, aa)


def bench_lengths(
    model: VideoModel,
    plans: Sequence[str] = ("fast", "balanced"),
    *,
    lengths: Sequence[int],
    rounds: int = 5,
    command: str = "",
    watch: Callable[[int], None] | None = None,
) -> Document:
    """Time single chunks after `lengths` latent frames; a results document, a row each.

    Caches are filled with random entries: a chunk's time depends on their number alone. Plans take
    turns as in `bench`, dense twice, and the noise is the widest of all lengths.
    """
    check("rounds", rounds)
    check("plans", len(lengths), "how many lengths there are")
    for length in lengths:
        check("at", length)
    turns = _turns(model, plans)
    rows: list[Document] = []
    widest = (1.0, 1.0)
    shuffle = random.Random(0)
    for done, length in enumerate(lengths):
        streams = [open_request(model, plan, VideoRequest(prompt=PROMPT)) for _, plan in turns]
        for stream in streams:
            fill(stream.session, length)
            _chunk(stream)  # warm-up: what is done once, such as a policy's first index
        takes: list[list[Document]] = [[] for _ in turns]
        for _ in range(rounds):
            for i in shuffle.sample(range(len(turns)), len(turns)):
                takes[i].append(_chunk(streams[i]))
        times = [[take["chunk_ms"] for take in of_plan] for of_plan in takes]
        aa = noise(times[0], times[1])
        widest = (min(widest[0], aa[0]), max(widest[1], aa[1]))
        for turn, of_plan, ms in zip(turns, takes, times, strict=True):
            if turn[0] == "again":
                continue
            row = _named(turn, model) | of_plan[-1] | {"length": length, "aa": aa}
            row["chunk_ms"] = statistics.median(ms)
            row["fps_steady"] = frame_rate(row["frames_made"], row["chunk_ms"])
            row["work_dense"] = row["macs"] / takes[0][-1]["macs"]
            ratios = [a / b for a, b in zip(times[0], ms, strict=True)]
            rows.append(row | verdict(ratios, aa))
        if watch is not None:
            watch(done + 1)
    return document(f"bench-lengths-{model.device.type}", rows, command, widest)


def _turns(model: VideoModel, plans: Sequence[str]) -> list[tuple[str, Plan]]:
    """The plans to time, dense twice and first."""
    named = {"dense": "dense", "again": "dense"}
    turns = [(name, parse_plan(model, text)) for name, text in named.items()]
    return turns + [(text, parse_plan(model, text)) for text in plans]


def _chunk(stream: Stream) -> Document:
    """Make another chunk; its size, time and work."""
    chunk = stream.step()
    return {"size": size_of(chunk), **summary([chunk.stats])}


def length_lines(results: Document) -> list[str]:
    """A document of `bench_lengths` as a table."""
    rows, machine = results["rows"], results["machine"]
    columns = [
        Column("plan", "name"),
        Column("latent frames", "length"),
        Column("frames/s", "fps_steady", ".2f"),
        Column("GMAC", lambda row: row["macs"] / 1e9, ".2f"),
        Column("% of dense", "work_dense", ".1%"),
        Column("cache MB", "cache_mb", ".1f"),
        Column("speed to dense", lambda row: None if row["name"] == "dense" else _speed(row)),
    ]
    spread = "; ".join(
        f"{row['length']}: {row['aa'][0]:.2f}x to {row['aa'][1]:.2f}x"
        for row in rows
        if row["name"] == "dense"
    )
    return [
        f"{rows[0]['model']} {rows[0]['size']}, one chunk after the given number of latent frames, "
        f"torch {results['versions']['torch']}, {machine['gpu'] or machine['cpu']}",
        *table(columns, rows),
        f"dense against itself, at {spread}; a ratio inside is noise",
    ]


def _speed(row: Mapping[str, Any]) -> str | None:
    return f"{row['ratio_dense']:.2f}x {speed_word(row)}" if "ratio_dense" in row else None


@dataclass(frozen=True)
class _Take:
    """One rollout of a round."""

    size: str
    rows: list[dict[str, float]]
    notes: list[str]
    more: Document

    def ms(self, start: int = 0) -> float:
        """Milliseconds from chunk `start` on; of a shorter video, from its first chunk."""
        return sum(row["wall_ms"] for row in self.rows[start if start < len(self.rows) else 0 :])


def _timed(model: VideoModel, plan: Plan, request: VideoRequest, frames: int) -> _Take:
    count_peak(model.device)
    rows, size = [], ""
    with Clock() as clock:
        stream = open_request(model, plan, request)
        for chunk in rollout(model, stream=stream, frames=frames):
            clock.lap(chunk)
            rows.append(chunk.stats)
            size = size_of(chunk)
    more = {"peak_gb": peak_gb(model.device)} if model.device.type == "cuda" else {}
    return _Take(size, rows, notes(stream.session, rows), more)


def _row(turn: tuple[str, Plan], takes: Sequence[_Take], model: VideoModel, start: int) -> Document:
    """A plan's counts, which are equal in every round, with the median of the rounds' times."""
    last = takes[-1]
    clocks = [summary(take.rows) | rates(take.rows, start) for take in takes]
    counts = {key: value for key, value in summary(last.rows).items() if not key.endswith("_ms")}
    timed = {
        key: statistics.median(clock[key] for clock in clocks)
        for key in clocks[0]
        if key not in counts
    }
    row = {"size": last.size} | counts | timed | last.more | {"notes": last.notes}
    return _named(turn, model) | row


def _named(turn: tuple[str, Plan], model: VideoModel) -> Document:
    return {"name": turn[0], "plan": str(turn[1]), "model": model.name}


def warm(model: VideoModel, plan: Plan | str, request: VideoRequest) -> float:
    """Make and discard two chunks, as a process's first ones take longer; the seconds it took."""
    begun = time.perf_counter()
    for _ in islice(rollout(model, plan, **vars(request)), WARM_CHUNKS):
        pass
    return time.perf_counter() - begun


def lines(results: Document) -> list[str]:
    """A bench document as a table: the noise, then time beside counted work."""
    if "length" in results["rows"][0]:
        return length_lines(results)
    rows, aa, machine = results["rows"], results["aa"], results["machine"]
    columns = [
        Column("plan", "name"),
        Column("frames/s once warm", "fps_steady", ".1f", none="–"),
        Column("average", "fps_avg", ".1f"),
        Column("first frame ms", lambda row: 1e3 * row["first_frame_s"], ".0f"),
        Column("chunk ms, median", "steady_ms", ".1f", none="–"),
        Column("p99", "p99_ms", ".1f", none="–"),
        Column("pairs scored, % of dense", "density", ".1%"),
        Column("MLP rows computed", "rows_computed", ".0f"),
        Column("GMAC", lambda row: row["macs"] / 1e9, ".2f"),
        Column("% of dense", lambda row: row["macs"] / rows[0]["macs"], ".1%"),
        Column("speed to dense once warm", _speed),
        Column("whole video", "ratio_dense_all", ".2f", "x"),
    ]
    out = [
        f"{rows[0]['model']} {rows[0]['size']}, {rows[0]['frames']:.0f} frames, "
        f"torch {results['versions']['torch']}, {machine['gpu'] or machine['cpu']}",
        f"dense against itself: {aa['low']:.2f}x to {aa['high']:.2f}x; a ratio inside is noise",
        *table(columns, rows),
    ]
    return out + [f"{row['name']}: {note}" for row in rows for note in row["notes"]]


def split_lengths(text: str, option: str) -> list[int]:
    """The numbers of latent frames in `25,100,600`."""
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,30}", word) for word in words):
        raise TachyscopeError(
            f"`{option}` is latent frames separated by commas, got {shown(text)}: try 25,100"
        )
    return [check("at", int(word), f"`{option}`") for word in words]


def split_plans(text: str) -> list[str]:
    """The plans in `fast;balanced`."""
    plans = [plan.strip() for plan in text.split(";") if plan.strip()]
    if not plans:
        raise TachyscopeError(
            f"`plans` are separated by ';', got {shown(text)}: try 'fast;balanced'"
        )
    check("plans", len(plans), "how many plans there are")
    return plans
