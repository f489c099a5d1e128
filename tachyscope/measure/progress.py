"""Progress on stderr: bars in a terminal, otherwise a line every ten seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tachyscope.core.observers import Observer
from tachyscope.core.types import Chunk, PassContext
from tachyscope.measure.rates import frame_rate

SAY_EVERY = 10.0  # seconds between lines where there is no terminal


def _terminal() -> Any:
    """rich's console in a terminal; None elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    return console if console.is_terminal else None


class Reading(Observer):
    """Counts the given chunks that a session reads when it is opened."""

    def __init__(self, count: Callable[[int], None]) -> None:
        self._count = count

    def on_commit(self, ctx: PassContext, n: int) -> None:
        if not ctx.prefilling:  # then they are the prompt's tokens
            self._count(ctx.shape.chunk)


class Progress:
    """Bars for runs and stages; lines without a terminal."""

    def __init__(self, frames: int = 0, bars: Any = None, shown: bool = True) -> None:
        self._frames, self._bars, self._shown = frames, bars, shown
        self._tasks: dict[str, Any] = {}
        self._sums: dict[str, defaultdict[str, float]] = {}
        self._begun = self._said = time.monotonic()
        self._stage_over = threading.Event()  # of the stage that is printed in lines

    def stage(self, text: str) -> None:
        """Show a stage of unknown length, such as loading; "" ends it."""
        self._stage_over.set()
        if self._bars is None:
            if text:
                self._stage_over = threading.Event()
                say = threading.Thread(
                    target=self._say_until, args=(self._stage_over, text), daemon=True
                )
                say.start()
            return
        if "stage" in self._tasks:
            self._bars.remove_task(self._tasks.pop("stage"))
        if text:
            self._tasks["stage"] = self._bars.add_task(text, total=None, text="", left="")

    def part(self, name: str, done: int, total: int | None, unit: str) -> None:
        """Show how many units of a part are done, of a total if it is known."""
        count = f"{done} {unit}"
        if total is not None:
            count = f"{done}/{total} {unit}" if self._bars else f"{name}: {done} of {total} {unit}"
        if self._bars is None:
            self._say(count)
            return
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, text="", left="")
        left = "" if total is None else "left" if done < total else "taken"
        self._bars.update(self._tasks[name], completed=done, text=count, left=left)

    def reading(self, name: str, frames: int) -> list[Observer]:
        """An observer that shows how many given frames were read; none for fewer than two."""
        if frames < 2:
            return []
        read, what = 0, f"{name}: reading given frames"
        self.part(what, 0, frames, "frames")

        def add(count: int) -> None:
            nonlocal read
            read = min(frames, read + count)
            self.part(what, read, frames, "frames")

        return [Reading(add)]

    def chunk(self, name: str, chunk: Chunk) -> None:
        """Show the frames, rate, cache and pairs of a run after another chunk."""
        total = self._sums.setdefault(name, defaultdict(float))
        for key in ("frames", "pairs", "pairs_dense"):
            total[key] += chunk.stats[key]
        # `inspect` has no clock from chunk to chunk
        ms = chunk.stats.get("wall_ms", chunk.stats["chunk_ms"])
        text = (
            f"{frame_rate(chunk.stats['frames_made'], ms):.1f} frames/s, "
            f"cache {chunk.stats['cache_mb']:.1f} MB, "
            f"{total['pairs'] / total['pairs_dense']:.0%} of dense's pairs"
        )
        done, frames = round(total["frames"]), self._frames
        if self._bars is None:
            self._say(f"{name}: {done} of {frames} frames, {text}")
            return
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=frames, text="", left="")
        left = "left" if done < frames else "taken"
        text = f"{done}/{frames} frames {text}"
        self._bars.update(self._tasks[name], completed=done, text=text, left=left)

    def _say_until(self, over: threading.Event, text: str) -> None:
        while not over.wait(SAY_EVERY):
            self._say(text)

    def _say(self, text: str) -> None:
        now = time.monotonic()
        if self._shown and now - self._said >= SAY_EVERY:
            self._said = now
            print(f"{text} after {now - self._begun:.0f} s", file=sys.stderr, flush=True)


@contextmanager
def progress(frames: int = 0, shown: bool = True) -> Iterator[Progress]:
    """Progress on stderr within the block; frames: of each run."""
    console = _terminal() if shown else None
    if console is None:
        lines = Progress(frames, shown=shown)
        try:
            yield lines
        finally:
            lines.stage("")
        return
    from rich import progress as rich

    bars = rich.Progress(
        rich.TextColumn("{task.description}"), rich.BarColumn(),
        rich.TextColumn("{task.fields[text]}"),
        rich.TimeRemainingColumn(elapsed_when_finished=True),
        rich.TextColumn("{task.fields[left]}"),
        console=console, redirect_stdout=sys.stdout.isatty(),
    )  # fmt: skip
    with bars:
        yield Progress(frames, bars)


@contextmanager
def parts_bar() -> Iterator[Callable[[str, int], None]]:
    """A bar for each part on stderr; call the value with a part's name and how many are done."""
    if _terminal() is None:
        print("measuring, which takes minutes; lines will say how far it is", file=sys.stderr)
    with progress() as watch:
        watch.stage("measuring")
        yield lambda name, done: watch.part(name, done, None, name)
        watch.stage("")
