"""Queries, keys and values of a trained model, brought to a larger model's shape.

Speeds are taken with random weights. To show that they do not depend on what a cache holds, the
same chunk is timed with contents traced from a small model that was trained, `atrium-world`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tachyscope.core.observers import Observer
from tachyscope.core.opening import open as open_stream
from tachyscope.core.rollout import rollout
from tachyscope.core.session import Session
from tachyscope.core.types import PassContext, Shape
from tachyscope.models.atrium.visit import Visit
from tachyscope.models.registry import load

WALK = "w*6 a*8 w*6"  # forward, a turn, forward
FRAMES = 20

# chunk by chunk, layer by layer: unrotated q, k, v [B, H, S, D]
Trace = list[list[tuple[Tensor, Tensor, Tensor]]]
# layer by layer, all chunks in one: [chunks, B, H, S, D]
Chunks = list[tuple[Tensor, ...]]


class Recorder(Observer):
    """Keeps what clean passes wrote."""

    def __init__(self) -> None:
        self.kept: Trace = []

    def on_write(self, ctx: PassContext, q: Tensor, k: Tensor, v: Tensor) -> None:
        if ctx.pass_index == ctx.pass_count - 1:
            if ctx.layer == 0:
                self.kept.append([])
            self.kept[-1].append((q, k, v))


class Traced(Observer):
    """Puts a trace's queries, keys and values in the place of the model's, in their own memory.

    The device's own time says which chunk of it, so that a CUDA graph can be replayed.
    """

    host = False

    def __init__(self, trace: Chunks) -> None:
        self.trace = trace

    def on_open(self, session: Session) -> None:
        self.session = session

    def on_pass(self, ctx: PassContext) -> None:
        time = self.session.positions(1)[:1, 0]
        self.chunk = (time / ctx.shape.chunk).long() % len(self.trace[0][0])

    def on_write(self, ctx: PassContext, q: Tensor, k: Tensor, v: Tensor) -> None:
        traced = self.trace[ctx.layer * len(self.trace) // ctx.shape.layers]
        for x, ours in zip((q, k, v), traced, strict=True):
            x.copy_(ours.index_select(0, self.chunk)[0])


def record(seed: int = 0) -> tuple[Trace, Shape]:
    """A walk through an unseen room in `atrium-world`, a true frame first; its shape beside it."""
    model = load("atrium-world")
    moves = [model.actions.index(word[0]) for word in WALK.split() for _ in range(int(word[2:]))]
    visit = Visit(1_000_000_000 + seed, moves)  # the room of the published traces
    recorder = Recorder()
    stream = open_stream(
        model, "dense", prompt=visit.prompt, frames=FRAMES, seed=seed, first=visit.frames(0, 1),
        start=visit.view if model.camera else None, observers=[recorder],
    )  # fmt: skip
    for _ in rollout(model, frames=FRAMES, actions=WALK, stream=stream):
        pass
    return recorder.kept, stream.session.shape


def trace_for(session: Session, seed: int = 0) -> Chunks:
    """A recorded walk in a session's own shape."""
    return enlarge(*record(seed), session.shape, session)


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
