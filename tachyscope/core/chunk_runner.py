"""Makes a session's chunks; once the cache is full, by replaying a CUDA graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import copy
from typing import Protocol

import torch
from torch import Tensor

from tachyscope.core.errors import warn
from tachyscope.core.exchange import agree_on_chunk
from tachyscope.core.session import Session
from tachyscope.core.work import Work
from tachyscope.decode import DecodeEngine, DecodeParts, DraftEngine, unsupported
from tachyscope.kernels.device import has_decode_kernel
from tachyscope.models.base import Ready, VideoModel

Make = Callable[[Ready | None], Tensor]


class Recorded(Protocol):
    """A recorded chunk: a CUDA graph whose output tensor is `latents`."""

    latents: Tensor

    def repeat(self, ready: Ready | None) -> None: ...


class Graph:
    """A chunk as CUDA graphs: one, or two if `ready` is given.

    The second then begins where the latents are final, and writes the cache; `ready` is called with
    the latents between them.
    """

    def __init__(self, session: Session, make: Make, ready: Ready | None) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []
        # a graph must join all streams that it forked, and a bank's copies may span passes
        split = ready is not None and session.memory.layers[0].bank is None
        with ExitStack() as recording:

            def record() -> None:
                graph = torch.cuda.CUDAGraph()
                # each replay advances the noise
                for generator in session.generators:
                    graph.register_generator_state(generator)
                # the graphs run one after the other and share a pool; thread_local, since another
                # thread may copy a snapshot to the host meanwhile
                pool = self.graphs[0].pool() if self.graphs else None
                capture = torch.cuda.graph(graph, pool, capture_error_mode="thread_local")
                recording.enter_context(capture)
                self.graphs.append(graph)

            def cut(latents: Tensor) -> None:
                recording.close()  # the first graph
                record()

            record()
            self.latents = make(cut if split else None)
        self.repeat(ready)  # recording runs nothing

    def repeat(self, ready: Ready | None) -> None:
        first, *rest = self.graphs
        first.replay()
        if ready is not None:
            ready(self.latents.clone())
        for graph in rest:
            graph.replay()


class ChunkRunner:
    """Makes the chunks of a session, one per call.

    Once a bounded cache is full, every chunk makes the same launches on the same memory: time,
    noise and actions are tensors on the device. With `record`, the third such chunk is recorded and
    later ones replay it: launched one by one, kernels would be bound by the host. A replayed
    chunk's work is that of the recorded one.
    """

    def __init__(
        self,
        model: VideoModel,
        session: Session,
        record: Callable[[Session, Make, Ready | None], Recorded] | None = None,
    ) -> None:
        self.model, self.session = model, session
        self.record = record
        self._alike = 0  # chunks in a row that made the same launches
        self._work, self._total = Work(), 0  # of the recorded chunk, and entries before it
        self._known: list[object] = []  # the lists of tensors that the launches read and write
        self._chunk = session.memory.chunk  # after the last call
        self._recorded: Recorded | None = None
        self._actions: Tensor | None = None  # that recorded launches read
        self.replayed = False  # whether the last chunk was a replay

    def __call__(self, moves: Sequence[int], ready: Ready | None = None) -> Tensor:
        """The next chunk's latents; `ready` is handed them before they are in the cache."""
        if self.session.ranks is not None:
            agree_on_chunk(self.session, self.session.ranks, moves)
        self.replayed = self._recorded is not None
        latents = self._next(moves, ready)
        self.replayed &= self._recorded is not None
        self._chunk = self.session.memory.chunk
        return latents

    def _next(self, moves: Sequence[int], ready: Ready | None) -> Tensor:
        session = self.session
        alike = is_steady(session) and self.model.graph_capturable
        if self.record is None or not alike:
            self.forget()
            return self._make(moves, ready)
        memory = session.memory
        known = [memory.texts, memory.layers]
        same = bool(self._known) and all(map(operator.is_, known, self._known))
        if not same or memory.chunk != self._chunk:
            # prompt changed, state restored, or the session was advanced elsewhere
            self.forget()
            self._known = known
        if self._recorded is not None:
            return self._repeat(moves, ready)
        before, total = session.work.take(), memory.total_entries
        if self._alike < 2:
            latents = self._make(moves, ready)
        else:
            actions = self._actions = self.model.actions_tensor(moves, session.shape.chunk)
            given = moves if actions is None else actions
            self._recorded = self.record(session, lambda cut: self._make(given, cut), ready)
            memory.latents = latents = self._recorded.latents.clone()
            self._work, self._total = copy(session.work), total
        self._alike += 1
        if not session.work.of_host:  # tensors on the device cannot be counted again
            self.forget()
        session.work.add(before)
        return latents

    def forget(self) -> None:
        """Drop the recording and its memory, and the cache that it worked on."""
        self._alike, self._recorded, self._actions, self._known = 0, None, None, []

    def _make(self, moves: Sequence[int] | Tensor, ready: Ready | None = None) -> Tensor:
        latents = self.model.sample(self.session, moves, ready)
        self.session.commit()
        self.session.memory.latents = latents
        return latents

    def _repeat(self, moves: Sequence[int], ready: Ready | None) -> Tensor:
        assert self._recorded is not None
        actions = self.model.actions_tensor(moves, self.session.shape.chunk)
        if actions is not None and self._actions is not None:
            self._actions.copy_(actions)
        self._recorded.repeat(ready)
        shape, memory = self.session.shape, self.session.memory
        self.session.work.add(self._work, memory.total_entries - self._total)
        memory.made += shape.chunk
        memory.count(shape.chunk * shape.tokens_per_frame)
        # the next replay overwrites this one's output
        memory.latents = self._recorded.latents.clone()
        return memory.latents


def is_steady(session: Session) -> bool:
    """Whether the next chunk makes the same launches as the last one.

    Not before the cache is full, nor where replay takes turns or the choice of passes depends on
    the latents.
    """
    shape, plan, memory = session.shape, session.plan, session.memory
    # given noise differs from chunk to chunk
    if memory.noise is not None or any(observer.host for observer in session.observers):
        return False
    full = memory.room is not None and plan.cache.is_full(
        shape, memory.past, memory.room, memory.total_entries
    )
    fixed = plan.passes.graph_capturable and not (
        shape.token_by_token or shape.rolling_frames or plan.cache.view_depends_on_pass
    )
    return full and fixed and not (plan.replay is not None and plan.replay.work_varies)


class FrameRunner:
    """Makes the frames of a token model with the decode engine, one per call.

    With `graph` a step is recorded at the first token and replayed for all others: as a CUDA graph,
    on a CPU as a native program. With an observer that reads on the host, every token is an eager
    pass.
    """

    record: None = None  # chunks are not recorded

    def __init__(
        self, model: VideoModel, session: Session, parts: DecodeParts, graph: bool = True
    ) -> None:
        self.model, self.session, self.parts, self.graph = model, session, parts, graph
        self.replayed = False  # whether the last frame replayed a CUDA graph
        self.engine: DecodeEngine | DraftEngine | None = None

    def __call__(self, moves: Sequence[int], ready: Ready | None = None) -> Tensor:
        session = self.session
        if any(observer.host for observer in session.observers):
            self.forget()
            latents = self.model.sample(session, moves)
        else:
            if self.engine is None:
                self.engine = self._make_engine()
            latents = self.model.sample_with_engine(self.engine, session, moves)
        if ready is not None:
            ready(latents)
        session.commit()
        session.memory.latents = latents
        on_gpu = session.device.type == "cuda"
        self.replayed = on_gpu and self.engine is not None and self.engine.replayed
        return latents

    def _make_engine(self) -> DecodeEngine | DraftEngine:
        if self.session.plan.passes.drafts_codes:
            return DraftEngine(self.parts, self.session, self.graph)
        return DecodeEngine(self.parts, self.session, self.graph)

    def forget(self) -> None:
        """Drop the engine, its recording and its memory."""
        self.engine = None


def make_runner(model: VideoModel, session: Session) -> ChunkRunner | FrameRunner:
    """The runner that makes a session's chunks: by CUDA graphs or compiled steps if possible."""
    alone = session.ranks is None
    if not alone or (session.device.type != "cuda" and not model.compiled):
        return ChunkRunner(model, session)
    parts = model.decode_parts()
    if session.device.type != "cuda" and parts is not None:
        if reason := unsupported(parts, session):
            warn(f"{session.plan} runs without a compiled step, each token by itself: {reason}")
            return ChunkRunner(model, session)
        return FrameRunner(model, session, parts)
    if parts is None:
        return ChunkRunner(model, session, Graph)
    if not has_decode_kernel(session.memory.layers[0].v[..., 0, 0]):
        return ChunkRunner(model, session)  # float32, or many rows: stock torch's
    if reason := unsupported(parts, session):
        warn(f"{session.plan} runs without a CUDA graph, each token by itself: {reason}")
        return ChunkRunner(model, session)
    return FrameRunner(model, session, parts)
