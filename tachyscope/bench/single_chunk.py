"""Single chunks for a clock: made, taken back, and what memory they needed."""

from __future__ import annotations

import gc
import time

import torch

from tachyscope.graph_runner import ChunkRunner
from tachyscope.models.wan.model import WanModel
from tachyscope.plan import Plan
from tachyscope.types import Shape

PROMPT = "a red room with a window, seen by a camera that turns slowly"


def make_chunk(make: ChunkRunner) -> dict[str, float]:
    """One chunk more, undecoded; its row of the meter."""
    model, session = make.model, make.session
    before = model.pixel_frames(session.latent_frame)
    moves = [0] * session.shape.chunk if model.actions else []
    begun = time.perf_counter()
    with session.meter.span("chunk"):
        make(moves)
    # on CUDA, what asking for it took: near the chunk's own time, the device waits for the host
    session.meter.add("host_ms", 1e3 * (time.perf_counter() - begun))
    session.meter.add("frames", model.pixel_frames(session.latent_frame) - before)
    return session.meter.take()


def repeat_chunk(make: ChunkRunner) -> dict[str, float]:
    """`make_chunk`, after which an unbounded cache is as long as it was.

    So every repetition has the same shapes, for which a library chose its kernels once. A bounded
    cache is no longer after a chunk than before.
    """
    session, counts = make.session, ("chunk", "latent_frame", "past", "total_entries")
    before = {name: getattr(session, name) for name in counts}
    row = make_chunk(make)
    if taken_back(session.plan):
        for name, value in before.items():
            setattr(session, name, value)
    return row


def taken_back(plan: Plan) -> bool:
    """Whether a chunk can be: what was merged with it, or indexed, could not."""
    return plan.cache.grows and not (plan.cache.merges or plan.attention.indexes)


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


def count_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gb(device: torch.device) -> float:
    """The most that tensors took since the count began; 0 on the CPU, where no one counts."""
    if device.type != "cuda":
        return 0.0
    return torch.cuda.max_memory_allocated(device) / 1e9
