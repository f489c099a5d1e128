"""Plans side by side in true relative time: each is made alone, then all are shown by one clock."""

from __future__ import annotations

import math
import os
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tachyscope.arguments import check_model, check_prompt, check_whole, parse_first, parse_plan
from tachyscope.bench.cpu import warm
from tachyscope.bench.single_chunk import count_peak, peak_gb
from tachyscope.bounds import check
from tachyscope.files import check_folder, write_atomically
from tachyscope.meter import summary
from tachyscope.models.base import VideoModel
from tachyscope.plan import label
from tachyscope.plan_notes import notes
from tachyscope.quality import Frames, Quality
from tachyscope.rates import LAST_CHUNKS, Clock, frame_rate, rates, warm_up
from tachyscope.report import write_report
from tachyscope.results import Document, document, to_json
from tachyscope.rollout import rollout
from tachyscope.runs import Run
from tachyscope.stream import open as open_stream
from tachyscope.types import Chunk
from tachyscope.video import BACKGROUND, VideoWriter, beside

if TYPE_CHECKING:
    from tachyscope.arguments import Actions, Pictures, PixelSize, Start

FPS = 25  # of the race's video, whatever the model's
LONGEST = 60.0  # seconds that the video takes where no speed is given
HOLD = 2.0  # seconds that its end is shown
A_ROW = 3  # videos beside each other; more stand below
SHORT_SIDE = 256  # pixels: a smaller video is enlarged to about that

Watch = Callable[[str, Chunk], None]
Truth = Callable[[int, int], np.ndarray]


@dataclass(frozen=True, slots=True)
class Race:
    """What `race` found: the results document, and the runs as a report shows them."""

    document: Document
    runs: tuple[Run, ...]

    @property
    def lead(self) -> str:
        """How long each run took, in a sentence, and how it was measured."""
        return str(self.document["lead"])


@dataclass(frozen=True)
class Recorded:
    """A run that was made alone, and when by its clock each chunk and frame was there."""

    text: str  # the plan as it was asked for
    run: Run
    frames: Frames  # [F, H, W, 3]

    @property
    def chunk_s(self) -> list[float]:
        """Seconds after the start at which each chunk was decoded."""
        return [ms / 1e3 for ms in accumulate(row["wall_ms"] for row in self.run.rows)]

    @property
    def frame_s(self) -> list[float]:
        """Seconds after the start at which each frame is shown.

        A chunk's first frame is shown when the chunk is decoded, the others spread over the time
        until the next one is; those of the last chunk over the time that it took itself.
        """
        ends = self.chunk_s
        took = [row["wall_ms"] / 1e3 for row in self.run.rows]
        spans = [*took[1:], took[-1]]
        return [
            end + span * i / row["frames"]
            for end, span, row in zip(ends, spans, self.run.rows, strict=True)
            for i in range(round(row["frames"]))
        ]

    def caption(self, seconds: float) -> str:
        """Two lines of the run at a time: clock and frames a second, then its cache's bytes."""
        rows, ends = self.run.rows, self.chunk_s
        there = bisect_right(ends, seconds)
        if not there:
            return f"{seconds:.1f} s\n"
        row = rows[there - 1]
        held = f"cache {_bytes(row['cache_mb'])}"
        if host := row.get("host_mb"):
            held += f", {_bytes(host)} in host memory"
        if there == len(rows):
            made = sum(row["frames_made"] for row in rows)
            rate = frame_rate(made, 1e3 * ends[-1])
            return f"{ends[-1]:.1f} s, done   {rate:.1f} frames/s\n{held}"
        newest = rows[max(0, there - LAST_CHUNKS) : there]
        rate = frame_rate(
            sum(row["frames_made"] for row in newest), sum(row["wall_ms"] for row in newest)
        )
        warming = "   warm-up" if there <= warm_up(rows) else ""
        return f"{seconds:.1f} s   {rate:.1f} frames/s{warming}\n{held}"


def race(
    model: VideoModel,
    plans: Sequence[str],
    *,
    frames: int,
    out: str | os.PathLike[str],
    prompt: str = "",
    actions: Actions = "",
    seed: int = 0,
    size: PixelSize | None = None,
    first: Pictures | None = None,
    first_actions: Actions = "",
    start: Start | None = None,
    pace: float | None = None,
    truth: Truth | None = None,
    speed: float | None = None,
    command: str = "",
    about: str = "",
    load_s: float = 0.0,
    watch: Watch | None = None,
) -> Race:
    """Make a video by each plan, one after another, and show them side by side by one clock.

    Frames, prompt, actions, seed, size, first, first_actions, start and pace are as `rollout` takes
    them. A plan is made alone, after two chunks for nothing; its clock starts when its first chunk
    is asked for, with prompt and given frames in the cache. Where the first plan is dense, the
    others' PSNR to it is measured; where `truth` gives the true frames from one number to another,
    every run's to that.
    out: a folder for race.mp4, race.html and race.json. speed: how much faster than it happened the
    video shows it; 1, or what makes it a minute long, unless given. about: a sentence for the
    page. watch: is told every chunk, with its run's name.
    """
    check_model(model)
    check_prompt(prompt)  # one video, no batch
    check_whole("seed", seed)
    check("plans", len(plans), "how many plans there are")
    if speed is not None:
        check("speed", speed)
    for plan in plans:
        parse_plan(model, plan).check(model.shape())
    folder = check_folder(out)
    options: dict[str, Any] = {
        "frames": frames, "prompt": prompt, "seed": seed, "size": size, "start": start,
        "pace": pace,
    }  # fmt: skip
    if first is not None:
        options |= {"first": parse_first(first), "first_actions": first_actions}
    recorded: list[Recorded] = []
    for name, plan in zip(_names(plans), plans, strict=True):
        dense = recorded[0].frames if recorded and plans[0] == "dense" else None
        recorded.append(
            _record(model, name, plan, options, actions, dense, truth, load_s, folder, watch)
        )
    pixels = "{}x{}".format(*recorded[0].frames.shape[1:3])
    last = max(one.chunk_s[-1] for one in recorded)
    shown = max(1.0, last / LONGEST) if speed is None else speed
    rows = [
        one.run.row(model.name, pixels, frame_s=[round(x, 4) for x in one.frame_s])
        for one in recorded
    ]
    lead = " ".join(filter(None, (_lead(recorded, shown), about)))
    results = Race(
        document("race", rows, command, speed=shown, lead=lead), tuple(one.run for one in recorded)
    )
    with VideoWriter(folder / "race.mp4", FPS) as file:
        for picture in pictures(recorded, shown):
            file.write(picture)
    write_atomically(folder / "race.json", to_json(results.document, indent=2) + "\n")
    dtype = str(model.dtype).removeprefix("torch.")
    write_report(
        folder / "race.html",
        f"{model.name}: {', '.join(run.name for run in results.runs)}",
        results.runs,
        results.document,
        model=f"{model.name}, {pixels}, {dtype}, {model.device}",
        video=(folder / "race.mp4").read_bytes(),
        by_clock=True,
    )
    return results


def _names(plans: Sequence[str]) -> list[str]:
    """A name a plan; a plan that stands twice, or has no short name, gets a number too."""
    names: list[str] = []
    for plan in plans:
        name, number = label(plan), 1
        while (unused := name if number == 1 else f"{name} {number}") in names:
            number += 1
        names.append(unused)
    return names


def _record(
    model: VideoModel,
    name: str,
    plan: str,
    options: dict[str, Any],
    actions: Actions,
    dense: Frames | None,
    truth: Truth | None,
    load_s: float,
    folder: Path,
    watch: Watch | None,
) -> Recorded:
    """Make one run with nothing beside it."""
    newest = {"first": options["first"][-1:]} if "first" in options else {}
    given = {key: options[key] for key in options if not key.startswith("first")}
    warmed = warm(model, plan, actions=actions, **given, **newest)
    count_peak(model.device)
    begun = time.perf_counter()
    stream = open_stream(model, plan, **options)
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    opened = time.perf_counter() - begun
    made, rows = [], []
    with Clock() as clock:
        chunks = rollout(
            model, frames=options["frames"], actions=actions, stream=stream, overlap_decode=True
        )
        for chunk in chunks:
            clock.lap(chunk)
            made.append(chunk.frames)
            rows.append(chunk.stats)
            if watch is not None:
                watch(name, chunk)
    # a run's frames wait on disk for the others: one run's alone are in memory
    with tempfile.TemporaryFile(dir=folder) as file:
        for frames in made:
            file.write(frames.tobytes())
        file.flush()
        kept = np.memmap(file, np.uint8, "r", shape=(sum(map(len, made)), *made[0].shape[1:]))
    near, true, done, looks = Quality(), Quality(against="truth"), 0, []
    for frames in made:
        stop = done + len(frames)
        look = near.add(frames, None if dense is None else dense[done:stop])
        if truth is not None:
            look |= true.add(frames, truth(done, stop))
        looks.append(look)
        done = stop
    sums = summary(rows) | near.summary() | rates(rows) | {"open_s": opened}
    sums["warm_s"] += warmed
    if truth is not None:
        sums["psnr_truth"] = true.summary()["psnr_truth"]
    if load_s:
        sums["load_s"] = load_s
    if model.device.type == "cuda":
        sums["peak_gb"] = peak_gb(model.device)
    seen = [row | look for row, look in zip(rows, looks, strict=True)]
    session = stream.session
    return Recorded(plan, Run(name, str(session.plan), seen, sums, notes(session, rows)), kept)


def _lead(recorded: Sequence[Recorded], speed: float) -> str:
    """Who took how long, the quickest first, and how to read it."""
    order = sorted(recorded, key=lambda one: one.chunk_s[-1])
    count = len(order[0].frames)
    times = ", ".join(f"{one.run.name} in {one.chunk_s[-1]:.1f} s" for one in order)
    shown = "as it happened" if speed == 1 else f"at {speed:.3g} times the speed that it had"
    return (
        f"{count} frames were made by {times}, each alone and after a warm-up of its own; the "
        f"video shows them {shown}. Times of single runs are no ratio: compare tells one beside "
        f"its noise."
    )


def pictures(recorded: Sequence[Recorded], speed: float) -> Iterator[Frames]:
    """The race as frames [1, H, W, 3], FPS of them a second, `speed` times as fast as it was."""
    height, width = recorded[0].frames.shape[1:3]
    scale = max(1, SHORT_SIDE // min(height, width))
    times = [one.frame_s for one in recorded]
    last = max(one.chunk_s[-1] for one in recorded)
    last = max(last, *(moments[-1] for moments in times))
    before, picture = None, None
    for i in range(math.ceil((last / speed + HOLD) * FPS)):
        seconds = i / FPS * speed
        shown = [bisect_right(moments, seconds) - 1 for moments in times]
        captions = [one.caption(seconds) for one in recorded]
        if (shown, captions) != before or picture is None:
            before = shown, captions
            picture = _grid(recorded, shown, captions, scale)
        yield picture


def _grid(
    recorded: Sequence[Recorded], shown: Sequence[int], captions: Sequence[str], scale: int
) -> Frames:
    """One picture of all runs; a run without a frame yet is blank."""
    blank = np.empty((1, *recorded[0].frames.shape[1:]), np.uint8)
    blank[:] = list(bytes.fromhex(BACKGROUND[1:]))
    videos = [
        blank if i < 0 else np.asarray(one.frames[i : i + 1])
        for one, i in zip(recorded, shown, strict=True)
    ]
    rows = math.ceil(len(videos) / A_ROW)
    columns = math.ceil(len(videos) / rows)
    missing = rows * columns - len(videos)
    videos += [blank] * missing
    labels = [one.text for one in recorded] + [""] * missing
    below = [*captions, *["\n"] * missing]
    parts = [
        beside(videos[i:stop], labels[i:stop], scale=scale, captions=below[i:stop])
        for i, stop in ((k * columns, (k + 1) * columns) for k in range(rows))
    ]
    return np.concatenate(parts, 1)


def _bytes(mb: float) -> str:
    if mb >= 1e3:
        return f"{mb / 1e3:.1f} GB"
    return f"{mb:.0f} MB" if mb >= 10 else f"{mb:.1f} MB"
