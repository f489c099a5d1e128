"""Writes sessions to disk on a thread of its own, so that no session waits for a disk."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from tachyscope.serve.live import Live
from tachyscope.serve.metrics import Metrics
from tachyscope.serve.snapshots import Saved, Snapshots

logger = logging.getLogger("tachyscope.serve")


class Keeper:
    """The snapshots of a server's sessions; its methods are called by the engine's thread."""

    def __init__(self, snapshots: Snapshots, metrics: Metrics) -> None:
        self.snapshots, self.metrics = snapshots, metrics
        self._writer = ThreadPoolExecutor(1, "tachyscope-snapshots")

    def save(self, live: Live) -> None:
        """Write a snapshot; none while the last one is being written."""
        if not live.kept:
            return
        if live.lane is None or live.saving:
            self.metrics.snapshots.labels("skipped").inc()
            return
        state, saved, chunk = live.lane.stream.snapshot(), live.to_save(), live.chunk
        live.saving = True
        self._writer.submit(self._write, live, saved, chunk, state)

    def is_saved(self, live: Live) -> bool:
        """Whether a session lies on disk as it is; it is written now if it does not."""
        for _ in range(2):  # the first time another may be under way
            if live.chunk not in live.saved:
                self.save(live)
                self.wait()
        return live.chunk in live.saved

    def load(self, live: Live, chunk: int) -> dict[str, Tensor]:
        """The tensors of one of its snapshots."""
        return self.snapshots.load(live.name, dict(live.files)[chunk])

    def remove(self, live: Live) -> None:
        self._writer.submit(self.snapshots.remove, live.name)

    def sweep(self, kept_s: float) -> None:
        self._writer.submit(self.snapshots.sweep, kept_s)

    def wait(self) -> None:
        """Until everything is written that was asked for."""
        self._writer.submit(lambda: None).result()

    def stop(self) -> None:
        self._writer.shutdown()

    def _write(self, live: Live, saved: Saved, chunk: int, state: Mapping[str, Tensor]) -> None:
        try:
            files, size = self.snapshots.save(live.name, saved, chunk, state)
        except OSError as fault:
            self.metrics.snapshots.labels("failed").inc()
            reason = (fault.strerror or str(fault)).lower()
            logger.warning("snapshot of session %s failed: %s", live.name, reason)
            live.say(
                type="notice",
                code="snapshot_failed",
                message=f"the last snapshot could not be written ({reason}): the session goes on, "
                f"and after a fault resumes from an older one",
            )
        else:
            self.metrics.snapshots.labels("written").inc()
            self.metrics.snapshot_bytes.inc(size)
            if live.generation == saved.generation:
                live.files = files
                live.say(type="snapshot", chunk=chunk, chunks=live.saved)
        finally:
            live.saving = False
