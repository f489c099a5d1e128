"""Where a chunk's time goes: the spans of one chunk, by part."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tachyscope.attention.ann import Ann
from tachyscope.observers import Timing
from tachyscope.session import Session


@contextmanager
def watched(session: Session) -> Iterator[None]:
    """Time a session's calls while it lasts; a CUDA graph is recorded with its spans."""
    timing = Timing(host=False)
    session.watch(timing)
    try:
        yield
    finally:
        session.unwatch(timing)


def parts(session: Session, row: Mapping[str, float]) -> dict[str, float]:
    """Milliseconds of a watched chunk by part; they add up to the chunk's.

    read: attention itself. choose: what the first pass's attention took beyond the others', where
    a policy chooses in it. enter: rotation, and writing into the cache. commit: bringing the past
    within budget. index: ordering it. rest: linears around attention, norms, sampling.
    """

    def span(name: str) -> float:
        return row.get(f"{name}_ms", 0.0)

    passes = range(session.shape.passes)
    reads = [span(f"read_{step}") for step in passes if span(f"read_{step}")]
    # the last pass is the clean one, which ends a layer early
    choose = 0.0
    if isinstance(session.plan.attention, Ann) and len(reads) > 2:
        choose = max(0.0, reads[0] - statistics.median(reads[1:-1]))
    found = {
        "read": sum(reads) - choose,
        "choose": choose,
        "enter": span("attend") - sum(reads),
        "cross": span("cross"),
        "mlp": span("mlp"),
        "commit": span("commit"),
        "index": span("index"),
    }
    return found | {"rest": span("chunk") - sum(found.values())}
