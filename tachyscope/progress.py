"""Bars on stderr that tell a person how far a run is; elsewhere they stay away."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from tachyscope.types import Chunk


@contextmanager
def frames_bar(frames: int) -> Iterator[Callable[[str, Chunk], None]]:
    """A bar a run on stderr, where a person looks on; the value takes a run's name and a chunk."""
    console = Console(stderr=True)
    columns = ("{task.completed:.0f}/{task.total:.0f} frames", "{task.fields[told]}")
    bars = Progress(
        TextColumn("{task.description}"), BarColumn(), *map(TextColumn, columns),
        console=console, disable=not console.is_terminal,
    )  # fmt: skip
    tasks: dict[str, TaskID] = {}
    sums: dict[str, defaultdict[str, float]] = {}

    def watch(name: str, chunk: Chunk) -> None:
        if name not in tasks:
            tasks[name] = bars.add_task(name, total=frames, told="")
            sums[name] = defaultdict(float)
        total = sums[name]
        for key in ("frames", "chunk_ms", "pairs", "pairs_dense"):
            total[key] += chunk.stats[key]
        told = (
            f"{1e3 * total['frames'] / total['chunk_ms']:.1f} frames/s, "
            f"cache {chunk.stats['cache_mb']:.1f} MB, "
            f"density {total['pairs'] / total['pairs_dense']:.0%}"
        )
        bars.update(tasks[name], completed=total["frames"], told=told)

    with bars:
        yield watch


@contextmanager
def rounds_bar(rounds: int) -> Iterator[Callable[[int], None]]:
    """A bar of rounds on stderr, where a person looks on; the value takes how many are done."""
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bars:
        task = bars.add_task("rounds", total=rounds)
        yield lambda done: bars.update(task, completed=done)


@contextmanager
def parts_bar() -> Iterator[Callable[[str, int], None]]:
    """A line a part on stderr, where a person looks on; the value takes its name and how many."""
    console = Console(stderr=True)
    count = TextColumn("{task.completed:.0f} {task.description}")
    bars = Progress(count, console=console, disable=not console.is_terminal)
    tasks: dict[str, TaskID] = {}

    def watch(name: str, done: int) -> None:
        if name not in tasks:
            tasks[name] = bars.add_task(name, total=None)
        bars.update(tasks[name], completed=done)

    with bars:
        yield watch
