"""Writes snapshots of sessions in a thread, so that no session waits for the disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tachyscope.core.errors import is_out_of_memory
from tachyscope.serve.lane import Lane
from tachyscope.serve.live_session import LiveSession
from tachyscope.serve.metrics import Metrics
from tachyscope.serve.snapshots import Saved, Snapshots

logger = logging.getLogger("tachyscope.serve")


class SnapshotWriter:
    """Writes the snapshots of a server's sessions; called by the engine's thread alone."""

    def __init__(self, snapshots: Snapshots, metrics: Metrics) -> None:
        self.snapshots, self.metrics = snapshots, metrics
        self._thread = ThreadPoolExecutor(1, "tachyscope-snapshots")
        self._waiting: dict[str, LiveSession] = {}  # by name, in the order in which they came
        self._writing = False
        self._stream: torch.cuda.Stream | None = None  # copies to the host

    def save(self, live: LiveSession) -> None:
        """Write a snapshot once no other is being written: each needs a copy in memory."""
        if live.kept:
            self._waiting[live.name] = live
            self.write_next()

    @property
    def due(self) -> bool:
        """Whether a session waits to be written, and none is being written."""
        return bool(self._waiting) and not self._writing

    def write_next(self) -> None:
        """Start the next snapshot that waits, if none is being written."""
        while self.due:
            live = self._waiting.pop(next(iter(self._waiting)))
            if live.lane is not None and live.chunk not in live.saved:
                self._begin(live.lane, live)

    def ensure_saved(self, live: LiveSession) -> bool:
        """Write a session's present chunk unless it is on disk; returns whether it is there now."""
        if live.chunk not in live.saved:
            self.save(live)
        while live.name in self._waiting or self._writing:
            self.wait()
            self.write_next()
        return live.chunk in live.saved

    def load(self, live: LiveSession, chunk: int) -> dict[str, Tensor]:
        """Load the tensors of one of a session's snapshots."""
        return self.snapshots.load(live.name, dict(live.files)[chunk])

    def remove(self, live: LiveSession) -> None:
        self._submit(self.snapshots.remove, live.name)

    def sweep(self, kept_s: float, most: int, opened: Collection[str]) -> None:
        self._submit(self.snapshots.sweep, kept_s, most, opened)

    def _submit(self, work: Callable[..., None], *given: Any) -> None:
        """Run a function in the writer's thread; an error is logged."""
        self._thread.submit(work, *given).add_done_callback(_log_fault)

    def wait(self) -> None:
        """Block until the writer's thread is idle."""
        self._thread.submit(lambda: None).result()

    def stop(self) -> None:
        self._thread.shutdown()

    def _begin(self, lane: Lane, live: LiveSession) -> None:
        try:
            state = lane.stream.snapshot()
        except RuntimeError as fault:
            if not is_out_of_memory(fault):
                raise
            self._failed(live, "no memory for a copy of it")
            return
        self._writing = True
        self._submit(self._write, live, live.to_save(), live.chunk, state)

    def _write(self, live: LiveSession, saved: Saved, chunk: int, state: dict[str, Tensor]) -> None:
        try:
            with self._beside(state):
                files, size = self.snapshots.save(live.name, saved, chunk, state)
        except OSError as fault:
            self._failed(live, (fault.strerror or str(fault)).lower())
        else:
            self.metrics.snapshots.labels("written").inc()
            self.metrics.snapshot_bytes.inc(size)
            if live.generation == saved.generation:
                live.files = files
                live.send(type="snapshot", chunk=chunk, chunks=live.saved)
        finally:
            self._writing = False

    def _beside(self, state: Mapping[str, Tensor]) -> AbstractContextManager[object]:
        """A CUDA stream of its own for copies to the host, so that sessions' chunks go on."""
        device = next((x.device for x in state.values() if x.is_cuda), None)
        if device is None:
            return nullcontext()
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.default_stream(device))  # which made the state
        return torch.cuda.stream(self._stream)

    def _failed(self, live: LiveSession, reason: str) -> None:
        self.metrics.snapshots.labels("failed").inc()
        logger.warning("snapshot of session %s failed: %s", live.name, reason)
        then = "resumes from an older one" if live.saved else "cannot be resumed"
        live.send(
            type="notice",
            code="snapshot_failed",
            message=f"the last snapshot could not be written ({reason}): the session goes on, "
            f"and after a fault {then}",
        )


def _log_fault(done: Future[None]) -> None:
    if not done.cancelled() and (fault := done.exception()) is not None:
        logger.error("the snapshot writer failed", exc_info=fault)
