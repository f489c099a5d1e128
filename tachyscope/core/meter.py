"""Measures a chunk's work and times as one row, and sums rows."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from tachyscope.core.work import Work


class Spans(Protocol):
    """Spans of time by their names."""

    def __getitem__(self, name: str) -> AbstractContextManager[None]: ...


NO_SPANS: Spans = defaultdict(nullcontext)


class Meter:
    """Counts work and adds up spans of time until take() returns the row.

    Tensor counts stay on their device and CUDA spans are pairs of events; both are read in take()
    alone, so that measuring never synchronises within a chunk.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._cuda = torch.device(device).type == "cuda"
        self.work = Work()
        self._times: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def add_time(self, name: str, milliseconds: float) -> None:
        key = f"{name}_ms"
        self._times[key] = self._times.get(key, 0.0) + milliseconds

    def __getitem__(self, name: str) -> AbstractContextManager[None]:
        return self.span(name)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        if self._cuda:
            # an external event is recorded again whenever the CUDA graph around it is replayed
            kept = torch.cuda.is_current_stream_capturing()
            start, stop = (torch.cuda.Event(enable_timing=True, external=kept) for _ in range(2))
            start.record()
            yield
            stop.record()
            self._events.append((name, start, stop))
        else:
            t0 = time.perf_counter()
            yield
            self.add_time(name, (time.perf_counter() - t0) * 1e3)

    def take(self) -> dict[str, float]:
        """The row since the last take: the one place that waits for the device."""
        for name, start, stop in self._events:
            stop.synchronize()
            self.add_time(name, start.elapsed_time(stop))
        row = self._times | self.work.take().row()
        self._times, self._events = {}, []
        return row


# values of a chunk that a rollout does not add up: its last chunk's are kept
LEVELS = ("cache_mb", "cache_allocated_mb", "host_mb", "entries", "entries_before")


def summary(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """A rollout's sums and the shares computed from them; for speeds see `rates`."""
    total: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            total[name] = value if name in LEVELS else total.get(name, 0.0) + value
    pairs, most = total.get("pairs", 0.0), max(total.get("pairs_dense", 0.0), 1.0)
    total["density"] = pairs / most
    if skipped := total.get("simulated_pairs_skipped"):
        total["simulated_density"] = (pairs - skipped) / most
    seen = total.get("rows_computed", 0.0) + total.get("rows_replayed", 0.0)
    replayed = total.get("rows_replayed", 0.0) + total.get("simulated_rows_replayed", 0.0)
    total["share_all"] = replayed / max(seen, 1.0)
    total["share_eligible"] = replayed / max(total.get("rows_eligible", 0.0), 1.0)
    if total.get("blocks_wanted"):
        for name in ("late", "denied"):
            total[f"{name}_share"] = total.get(f"blocks_{name}", 0.0) / total["blocks_wanted"]
    if total.get("text_pairs_dense"):
        total["text_density"] = total["text_pairs"] / total["text_pairs_dense"]
    return total
