"""Single chunks for a clock: made, taken back, and what memory they needed."""

from __future__ import annotations

import gc

import torch

from tachyscope.models.wan.model import WanModel
from tachyscope.plan import Plan
from tachyscope.stream import Stream
from tachyscope.types import Shape

PROMPT = "a red room with a window, seen by a camera that turns slowly"


def repeat_chunk(stream: Stream) -> dict[str, float]:
    """One chunk more, undecoded, after which an unbounded cache is as long as it was.

    So every repetition has the same shapes, for which a library chose its kernels once. A bounded
    cache is no longer after a chunk than before.
    """
    session, counts = stream.session, ("chunk", "latent_frame", "past", "total_entries")
    before = {name: getattr(session, name) for name in counts}
    row = stream.generate().stats
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
