"""Queries, keys and values of a trained model, brought to a larger model's shape.

Speeds are taken with random weights. To show that they do not hang on what a cache holds, the same
chunk is timed with contents traced from a small model that was trained, `atrium-world`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tachyscope.models.registry import load
from tachyscope.rollout import rollout
from tachyscope.session import Session
from tachyscope.stream import open as open_stream
from tachyscope.types import Shape
from tachyscope.worlds.visit import Visit

WALK = "w*6 a*8 w*6"  # forward, a turn, forward
FRAMES = 20

# chunk by chunk, layer by layer: unrotated q, k, v [B, H, S, D]
Trace = list[list[tuple[Tensor, Tensor, Tensor]]]
# layer by layer, all chunks in one: [chunks, B, H, S, D]
Chunks = list[tuple[Tensor, ...]]


class Recorder(Session):
    """A session that keeps what its clean passes entered."""

    watches = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.kept: Trace = []
        super().__init__(*args, **kwargs)

    def write_kv(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx = self._context
        assert ctx is not None
        if ctx.pass_index == ctx.pass_count - 1:
            if layer == 0:
                self.kept.append([])
            self.kept[-1].append((q, k, v))
        return super().write_kv(layer, q, k, v)


class Traced(Session):
    """A session that is told a trace's queries, keys and values, whatever the model says.

    Which chunk of it, is told by the device's own time, so that launches can be repeated.
    """

    def __init__(self, trace: Chunks, *args: Any, **kwargs: Any) -> None:
        self.trace = trace
        super().__init__(*args, **kwargs)

    def write_kv(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        told = self.trace[layer * len(self.trace) // self.shape.layers]
        chunk = (self._time / self.shape.chunk).long() % len(told[0])
        q, k, v = (x.index_select(0, chunk.view(1))[0] for x in told)
        return super().write_kv(layer, q, k, v)


def record(seed: int = 0) -> tuple[Trace, Shape]:
    """A walk through an unseen room in `atrium-world`, a true frame first; its shape beside it."""
    model = load("atrium-world")
    moves = [model.actions.index(word[0]) for word in WALK.split() for _ in range(int(word[2:]))]
    visit = Visit(1_000_000_000 + seed, moves)  # the room of the published traces
    stream = open_stream(
        model, "dense", prompt=visit.prompt, frames=FRAMES, seed=seed, first=visit.frames(0, 1),
        make=Recorder,
    )  # fmt: skip
    for _ in rollout(model, frames=FRAMES, actions=WALK, stream=stream):
        pass
    assert isinstance(stream.session, Recorder)
    return stream.session.kept, stream.session.shape


def enlarge(trace: Trace, small: Shape, shape: Shape, like: Session) -> Chunks:
    """A trace of single latent frames as chunks of another shape, on a session's device.

    Heads and channels are repeated, queries and keys divided so that their products stay as they
    were; a place takes the nearest one of the small grid; layers are repeated in order.
    """
    rows, columns = (
        torch.arange(n, device=like.device) * m // n
        for n, m in zip(shape.grid, small.grid, strict=True)
    )
    place = (rows[:, None] * small.grid[1] + columns).flatten()
    times = -(-shape.head_dim // small.head_dim)
    # q·k / √D: more channels add to the sum, and lower the factor
    scale = (shape.head_dim / small.head_dim) ** -0.25

    def larger(frames: list[Tensor], factor: float) -> Tensor:
        x = torch.cat([x.to(like.device)[:, :, place] for x in frames], 2)  # [B, H, S, D]
        heads = torch.arange(shape.kv_heads, device=like.device) % x.shape[1]
        x = (x[:, heads] * factor).repeat(1, 1, 1, times)[..., : shape.head_dim].to(like.dtype)
        return x

    whole = len(trace) // shape.chunk
    chunks = [trace[i * shape.chunk : (i + 1) * shape.chunk] for i in range(whole)]
    return [
        tuple(
            torch.stack(
                [larger([frame[layer][part] for frame in chunk], factor) for chunk in chunks]
            )
            for part, factor in enumerate((scale, scale, 1.0))
        )
        for layer in range(small.layers)
    ]
