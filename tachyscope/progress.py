"""Bars on stderr that tell a person how far a run is; elsewhere they stay away."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tachyscope.rates import frame_rate
from tachyscope.types import Chunk

SAY_EVERY = 10.0  # seconds between lines where there is no terminal


def _terminal() -> Any:
    """rich's console where a person looks on; None elsewhere, and where rich is not installed."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(stderr=True)
    return console if console.is_terminal else None


@contextmanager
def frames_bar(frames: int, quiet: bool = False) -> Iterator[Callable[[str, Chunk], None]]:
    """A bar a run on stderr, where a person looks on; the value takes a run's name and a chunk."""
    console = None if quiet else _terminal()
    if console is None:
        yield lambda name, chunk: None
        return
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = ("{task.completed:.0f}/{task.total:.0f} frames", "{task.fields[text]}")
    bars = Progress(
        TextColumn("{task.description}"), BarColumn(), *map(TextColumn, columns),
        TimeRemainingColumn(elapsed_when_finished=True), TextColumn("{task.fields[left]}"),
        console=console,
    )  # fmt: skip
    tasks: dict[str, TaskID] = {}
    sums: dict[str, defaultdict[str, float]] = {}

    def watch(name: str, chunk: Chunk) -> None:
        if name not in tasks:
            tasks[name] = bars.add_task(name, total=frames, text="", left="")
            sums[name] = defaultdict(float)
        total = sums[name]
        for key in ("frames", "pairs", "pairs_dense"):
            total[key] += chunk.stats[key]
        # inspection times nothing from chunk to chunk
        ms = chunk.stats.get("wall_ms", chunk.stats["chunk_ms"])
        text = (
            f"{frame_rate(chunk.stats['frames_made'], ms):.1f} frames/s, "
            f"cache {chunk.stats['cache_mb']:.1f} MB, "
            f"{total['pairs'] / total['pairs_dense']:.0%} of dense's pairs"
        )
        left = "left" if total["frames"] < frames else "taken"
        bars.update(tasks[name], completed=total["frames"], text=text, left=left)

    with bars:
        yield watch


@contextmanager
def rounds_bar(rounds: int) -> Iterator[Callable[[int], None]]:
    """A bar of rounds on stderr, where a person looks on; the value takes how many are done."""
    console = _terminal()
    if console is None:
        yield lambda done: None
        return
    from rich.progress import Progress

    with Progress(console=console) as bars:
        task = bars.add_task("rounds", total=rounds)
        yield lambda done: bars.update(task, completed=done)


@contextmanager
def parts_bar() -> Iterator[Callable[[str, int], None]]:
    """A line a part on stderr; the value takes its name and how many are done.

    Where no person looks on, a new line now and then: the work takes minutes.
    """
    console = _terminal()
    if console is None:
        print("measuring, which takes minutes; lines will say how far it is", file=sys.stderr)
        begun = printed = time.monotonic()

        def tell(name: str, done: int) -> None:
            nonlocal printed
            now = time.monotonic()
            if now - printed >= SAY_EVERY:
                printed = now
                print(f"{done} {name} after {now - begun:.0f} s", file=sys.stderr, flush=True)

        yield tell
        return
    from rich.progress import Progress, TaskID, TextColumn, TimeElapsedColumn

    count = TextColumn("{task.completed:.0f} {task.description}")
    tasks: dict[str, TaskID] = {}
    with Progress(count, TimeElapsedColumn(), console=console) as bars:

        def watch(name: str, done: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=None)
            bars.update(tasks[name], completed=done)

        yield watch
