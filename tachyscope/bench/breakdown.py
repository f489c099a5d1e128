"""Where a chunk's time goes: spans around a session's calls, for one chunk of its own."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tachyscope.attention.ann import Ann
from tachyscope.session import Session

# a session's calls, and what their spans are called
CALLS = {"attend": "attend", "cross": "cross", "mlp": "mlp"}


class Watched:
    """Stands in for a policy: the calls that are named are timed, the others pass through."""

    def __init__(self, policy: Any, session: Session, names: Mapping[str, Callable[..., str]]):
        self._policy, self._session, self._names = policy, session, names

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._policy, name)
        if name not in self._names:
            return found
        called = self._names[name]

        def timed(*args: Any) -> Any:
            with self._session.meter.span(called(*args)):
                return found(*args)

        return timed


@contextmanager
def watched(session: Session) -> Iterator[None]:
    """Time a session's calls while it lasts; the meter's row then has a span for each.

    Hot code knows nothing of it: the calls are wrapped for a chunk that is not counted.
    """
    plan = session.plan

    def spanned(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            with session.meter.span(name):
                return call(*args)

        return timed

    for call, name in CALLS.items():
        setattr(session, call, spanned(getattr(session, call), name))
    reads = {
        "attend": lambda q, layer, ctx, meter: f"read_{ctx.pass_index}",
        "build_index": lambda *_: "index",
        "restore_order": lambda *_: "index",
    }
    timed: Any = {
        "cache": Watched(plan.cache, session, {"commit": lambda *_: "commit"}),
        "attention": Watched(plan.attention, session, reads),
    }
    session.plan = dataclasses.replace(plan, **timed)
    try:
        yield
    finally:
        session.plan = plan
        for call in CALLS:
            delattr(session, call)


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
