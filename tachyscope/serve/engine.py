"""One thread that owns the model: it opens sessions and schedules their turns.

A turn is one chunk of one session. The session that has been due for longest is next, so none
starves. Sessions with a client are resident: their caches and CUDA graphs stay in memory. One that
lost its client stays too until its memory is needed, and then waits as a snapshot on disk.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.request import chunks_for
from tachyscope.memory.predict import ROOM, need
from tachyscope.models.base import VideoModel
from tachyscope.serve import protocol
from tachyscope.serve.action_log import ActionLog, Opening
from tachyscope.serve.key_map import KeyMap
from tachyscope.serve.limits import Limits
from tachyscope.serve.live_session import Event, LiveSession
from tachyscope.serve.metrics import Metrics
from tachyscope.serve.scratch import Scratch
from tachyscope.serve.session_pool import Full, SessionPool
from tachyscope.serve.session_runner import SessionRunner
from tachyscope.serve.snapshot_writer import SnapshotWriter
from tachyscope.serve.snapshots import Snapshots

T = TypeVar("T")
Emit = Callable[[Event], None]
SNAPSHOT_CHUNKS = 32  # chunks between two snapshots of a session
SWEEP_S = 60.0
CALLS_S = 0.05  # for calls between two turns; the call that reaches it is finished


class Engine:
    """Sessions of one model on one device."""

    def __init__(
        self,
        model: VideoModel,
        name: str,
        snapshots: Snapshots,
        *,
        plan: str,
        budget: int,
        limits: Limits,
        metrics: Metrics,
        snapshot_chunks: int = SNAPSHOT_CHUNKS,
    ) -> None:
        """`name` is the model's in the registry, `plan` the default, `budget` bytes for caches."""
        self.model, self.name, self.plan = model, name, plan
        self.limits, self.metrics = limits, metrics
        self.writer = SnapshotWriter(snapshots, metrics)
        self.pool = SessionPool(model, name, self.writer, budget, limits)
        self.runner = SessionRunner(self.pool, metrics, snapshot_chunks, self.recording)
        self.pool.new_log(Opening(plan))  # raises where the plan is none
        self.reading = asyncio.Lock()  # a long message; parsing it takes the event loop's time
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._swept = time.monotonic()
        self._recordings: Scratch | None = None  # once it is started
        self._thread = threading.Thread(target=self._run, name="tachyscope-engine", daemon=True)
        metrics.budget.set(budget)

    def start(self) -> None:
        self._recordings = Scratch()
        self.pool.sweep()
        self._thread.start()

    def stop(self) -> None:
        """Save every session, and end the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()
        self.writer.stop()
        if self._recordings is not None:
            self._recordings.remove()

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Run a function in the engine's thread, between two turns."""
        future: Future[T] = Future()
        with self._wake:
            if self._stopping:
                future.set_exception(Full("the server is stopping: come back in a minute"))
                return future
            self._calls.append((work, future))
            self._wake.notify()
        return future

    def post(self, live: LiveSession, message: protocol.Message) -> None:
        """Put a client's message into its session's inbox."""
        live.inbox.append((message, time.monotonic()))
        with self._wake:
            self._wake.notify()

    def feed(self, live: LiveSession, picture: np.ndarray) -> None:
        """Give a session a camera's picture; a session that follows no camera drops it."""
        lane = live.lane
        if lane is not None and lane.camera is not None:
            lane.camera.put(picture)
            with self._wake:
                self._wake.notify()

    def find(self, name: str, secret: str) -> LiveSession | None:
        """An open session; None unless the secret is its own."""
        live = self.pool.sessions.get(name)
        if live is None or not hmac.compare_digest(live.secret.encode(), secret.encode()):
            return None
        return live

    def recording(self, name: str) -> Path:
        """The path of a finished mp4."""
        assert self._recordings is not None
        return self._recordings.path / f"{name}.mp4"

    def finished(self, name: str, secret: str) -> Path | None:
        """A session's finished mp4; None without one, while it is written, or by a wrong secret."""
        live, path = self.find(name, secret), self.recording(name)
        return path if live and live.recording is None and path.exists() else None

    def count(self) -> None:
        """Update the gauges."""
        sessions, resident = list(self.pool.sessions.values()), self.pool.resident
        self.metrics.sessions.labels("playing").set(sum(one.emit is not None for one in sessions))
        self.metrics.sessions.labels("resident").set(len(resident))
        self.metrics.sessions.labels("on_disk").set(len(sessions) - len(resident))
        self.metrics.reserved.set(self.pool.reserved)

    # the methods below run in the engine's thread

    def open(self, message: protocol.Open, emit: Emit) -> LiveSession:
        """A new session; raises `Full` without a free slot or memory."""
        if message.log is not None:
            return self.play(self.pool.read_log(message.log), message.pace, emit)
        plan = message.plan or self.plan
        opening = Opening(
            plan, message.prompt, message.seed, message.world, message.strength,
            image=message.image,
        )  # fmt: skip
        return self.play(self.pool.new_log(opening, message.look), message.pace, emit)

    def play(self, log: ActionLog, pace: str, emit: Emit) -> LiveSession:
        """Open a session that plays the steps of a log first."""
        steps, log.steps = log.steps, []
        size = self.pool.bytes_of(log.opening.plan, bool(log.opening.strength))
        live = LiveSession(log, size, self.model.fps, KeyMap.of(self.model), pace)
        self.pool.add(live)
        try:
            live.begin_again(log, steps)
            self.pool.open_lane(live)
        except BaseException:
            self.pool.forget(live)
            raise
        live.emit = emit
        self.metrics.opened.labels("open").inc()
        return live

    def resume(self, message: protocol.Resume, emit: Emit) -> LiveSession:
        """Continue a session that lost its client or server; a present client is disconnected."""
        live = self.pool.sessions.get(message.session)
        if live is None:
            live = self._saved(message)
            self.pool.add(live)
        elif self.find(message.session, message.secret) is None:
            raise TachyscopeError("no session of this name and secret is kept here: open a new one")
        if live.emit is not None:
            live.send(type="closed", reason="another client resumed this session")
        if live.lane is None:
            self.pool.reserve(live, live.bytes)
            try:
                self.pool.load_newest(live)
            except BaseException:
                self.pool.forget(live)
                raise
        live.emit, live.due = emit, time.monotonic()
        self.metrics.opened.labels("resume").inc()
        return live

    def detach(self, emit: Emit) -> None:
        """Forget a client that is gone; its session waits at its chunk, and is saved."""
        for live in list(self.pool.sessions.values()):
            if live.emit == emit:
                live.emit, live.used = None, time.monotonic()
                live.inbox.clear()
                self.runner.set_beside(live, "off")
                if live.log.opening.strength:  # its camera is gone
                    self.pool.forget(live)
                elif live.chunk and live.chunk not in live.saved:
                    self.writer.save(live)

    def release_detached(self) -> None:
        """Save and drop all sessions without a client: another machine may continue them."""
        for live in list(self.pool.sessions.values()):
            if live.emit is None and self.writer.ensure_saved(live):
                self.pool.forget(live)

    def close(self, live: LiveSession) -> None:
        """End a session and remove its files."""
        self.pool.forget(live)
        self.recording(live.name).unlink(missing_ok=True)
        self.writer.remove(live)
        self.metrics.ended.labels("closed").inc()

    def _saved(self, message: protocol.Resume) -> LiveSession:
        """Load a session from its folder, without its tensors."""
        saved = self.writer.snapshots.find(message.session, message.secret)
        log = self.pool.read_log(saved.log)
        size = self.pool.bytes_of(log.opening.plan)
        live = LiveSession(
            log, size, self.model.fps, KeyMap.of(self.model),
            name=message.session, secret=message.secret,
        )  # fmt: skip
        live.generation, live.files = saved.generation, saved.files
        return live

    def _run(self) -> None:
        while True:
            with self._wake:
                live = self._next()
                while not (self._stopping or self._calls or live or self.writer.due):
                    self._wake.wait(self._patience())
                    live = self._next()
                if self._stopping:
                    break
            self._answer_calls()
            live = self._next()  # a call may have ended the session that was due
            if live is not None:
                self.runner.run_turn(live)
            self.writer.write_next()
            if time.monotonic() - self._swept > SWEEP_S:
                self._sweep()
        self._save_all()

    def _answer_calls(self) -> None:
        """Run calls for at most `CALLS_S`, so that the next turn is never delayed longer."""
        until = time.monotonic() + CALLS_S
        while self._calls and time.monotonic() < until:
            _answer(*self._calls.popleft())

    def _save_all(self) -> None:
        for live in list(self.pool.sessions.values()):
            if live.chunk:
                self.writer.ensure_saved(live)
            live.send(type="closed", reason="the server is stopping: resume in a minute")
            self.pool.forget(live)
        for _, future in self._calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(Full("the server is stopping: come back in a minute"))

    def _next(self) -> LiveSession | None:
        """The session that has been due for longest, or None."""
        now, sessions = time.monotonic(), self.pool.sessions.values()
        due = [one for one in sessions if one.ready and one.due <= now]
        if not due:  # idle: the plans beside catch up
            due = [one for one in sessions if one.lags]
        return min(due, key=lambda one: one.due, default=None)

    def _patience(self) -> float:
        """Seconds until a session is due, at most one."""
        now = time.monotonic()
        coming = [one.due for one in self.pool.sessions.values() if one.ready]
        return max(0.001, min([*coming, now + 1.0]) - now)

    def _sweep(self) -> None:
        """Forget sessions whose client has been gone for `kept_s`."""
        self._swept = time.monotonic()
        for live in list(self.pool.sessions.values()):
            if live.emit is None and self._swept - live.used > self.limits.kept_s:
                self.pool.forget(live)
                self.metrics.ended.labels("kept").inc()
        self.pool.sweep()


def make_engine(
    model: VideoModel,
    name: str,
    snapshots: Snapshots,
    plan: str,
    limits: Limits,
    budget: int | None = None,
    snapshot_chunks: int = SNAPSHOT_CHUNKS,
) -> Engine:
    """A server's engine; the model is compiled where its sessions are long enough to gain."""
    if model.compiling_pays(chunks_for(model, model.shape().chunk, 0, limits.session_frames)):
        model.compile()
    budget = default_budget(model, plan) if budget is None else budget
    return Engine(
        model, name, snapshots, plan=plan, budget=budget, limits=limits, metrics=Metrics(),
        snapshot_chunks=snapshot_chunks,
    )  # fmt: skip


def default_budget(model: VideoModel, plan: str) -> int:
    """Bytes for sessions: the GPU's free memory, or half of the machine's."""
    if model.device.type != "cuda":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    free, _ = torch.cuda.mem_get_info(model.device)
    others = need(model.on_meta(), plan, frames=1).beside_sessions
    return max(0, int(ROOM * free) - others)


def _answer(work: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as fault:
        future.set_exception(fault)
