"""Single chunks for a clock: made, taken back, where their time goes, what memory they needed."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from tachyscope.attention.blocks import BlockAttention
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.observers import Timing
from tachyscope.core.plan import Plan
from tachyscope.core.session import Session
from tachyscope.core.stream import Stream
from tachyscope.core.types import Shape
from tachyscope.io.machine import count_peak, memory_of
from tachyscope.models.base import VideoModel
from tachyscope.models.wan.model import WanModel

PROMPT = "a red room with a window, seen by a camera that turns slowly"


def repeat_chunk(stream: Stream) -> dict[str, float]:
    """One chunk more, undecoded, after which an unbounded cache is as long as it was.

    So every repetition has the same shapes, for which a library chose its kernels once. A bounded
    cache is no longer after a chunk than before.
    """
    session, counts = stream.session, ("chunk", "latent_frame", "past", "total_entries")
    before = {name: getattr(session.memory, name) for name in counts}
    row = stream.generate(turning(stream.model, session)).stats
    if taken_back(session.plan):
        for name, value in before.items():
            setattr(session.memory, name, value)
    return row


def turning(model: VideoModel, session: Session) -> list[int]:
    """A chunk's actions: the last one, which turns a camera; none where a model has none."""
    return [len(model.actions) - 1] * session.shape.chunk if model.actions else []


def taken_back(plan: Plan) -> bool:
    """Whether a chunk can be: what was merged with it, or indexed, could not."""
    return plan.cache.grows and not (plan.cache.merges or plan.attention.indexes)


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
    if isinstance(session.plan.attention, BlockAttention) and len(reads) > 2:
        choose = max(0.0, reads[0] - statistics.median(reads[1:-1]))
    times = {
        "read": sum(reads) - choose,
        "choose": choose,
        "enter": span("attend") - sum(reads),
        "cross": span("cross"),
        "mlp": span("mlp"),
        "commit": span("commit"),
        "index": span("index"),
    }
    return times | {"rest": span("chunk") - sum(times.values())}


def shown_size(model: WanModel, shape: Shape) -> str:
    """Pixels of a shape's frames, as `--size` takes them."""
    c = model.config
    high, wide = (c.stride[i] * c.patch[i] for i in (1, 2))
    return f"{shape.grid[0] * high}x{shape.grid[1] * wide}"


def clear(device: torch.device) -> None:
    """Free what no one holds, and count the peak from here."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    count_peak(device)


def hold_memory(device: str, gigabytes: float) -> None:
    """Let torch take no more of a GPU's memory than this."""
    total = memory_of(torch.device(device)) if device.startswith("cuda") else None
    if total is None:
        raise TachyscopeError(f"only a GPU's memory can be held, got device {device!r}: use cuda")
    index = torch.device(device).index or 0
    torch.cuda.set_per_process_memory_fraction(min(1.0, 1e9 * gigabytes / total), index)
