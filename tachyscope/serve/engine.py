"""One thread that owns the model: it opens sessions and gives them their turns.

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
from tachyscope.serve.keeper import Keeper
from tachyscope.serve.key_map import KeyMap
from tachyscope.serve.limits import Limits
from tachyscope.serve.live import Event, Live
from tachyscope.serve.metrics import Metrics
from tachyscope.serve.room import Full, Room
from tachyscope.serve.scratch import Scratch
from tachyscope.serve.snapshots import Snapshots
from tachyscope.serve.turns import Turns

T = TypeVar("T")
Tell = Callable[[Event], None]
SNAPSHOT_CHUNKS = 32  # between two snapshots
SWEEP_S = 60.0
CALLS_S = 0.05  # of calls between two turns, and the one under way


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
        self.keeper = Keeper(snapshots, metrics)
        self.room = Room(model, name, self.keeper, budget, limits)
        self.turns = Turns(self.room, metrics, snapshot_chunks, self.recording)
        self.room.new_log(Opening(plan))  # raises where the plan is none
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
        self.room.sweep()
        self._thread.start()

    def stop(self) -> None:
        """Save every session, and end the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()
        self.keeper.stop()
        if self._recordings is not None:
            self._recordings.remove()

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Have the engine's thread do something between two turns."""
        future: Future[T] = Future()
        with self._wake:
            if self._stopping:
                future.set_exception(Full("the server is stopping: come back in a minute"))
                return future
            self._calls.append((work, future))
            self._wake.notify()
        return future

    def post(self, live: Live, message: protocol.Message) -> None:
        """Hand a client's message to its session."""
        live.inbox.append((message, time.monotonic()))
        with self._wake:
            self._wake.notify()

    def feed(self, live: Live, picture: np.ndarray) -> None:
        """Hand a picture of its client's camera to a session; one that follows none drops it."""
        lane = live.lane
        if lane is not None and lane.camera is not None:
            lane.camera.put(picture)
            with self._wake:
                self._wake.notify()

    def find(self, name: str, secret: str) -> Live | None:
        """An open session, for who has its secret."""
        live = self.room.sessions.get(name)
        if live is None or not hmac.compare_digest(live.secret.encode(), secret.encode()):
            return None
        return live

    def recording(self, name: str) -> Path:
        """Where the mp4 of this name lies, once it is finished."""
        assert self._recordings is not None
        return self._recordings.path / f"{name}.mp4"

    def finished(self, name: str, secret: str) -> Path | None:
        """A session's mp4, for who has its secret; None where there is none, or it is written."""
        live, path = self.find(name, secret), self.recording(name)
        return path if live and live.recording is None and path.exists() else None

    def count(self) -> None:
        """Bring the gauges up to date."""
        sessions, resident = list(self.room.sessions.values()), self.room.resident
        self.metrics.sessions.labels("playing").set(sum(one.tell is not None for one in sessions))
        self.metrics.sessions.labels("resident").set(len(resident))
        self.metrics.sessions.labels("on_disk").set(len(sessions) - len(resident))
        self.metrics.reserved.set(self.room.reserved)

    # what follows runs in the engine's thread

    def open(self, message: protocol.Open, tell: Tell) -> Live:
        """A new session; raises `Full` where there is no room."""
        if message.log is not None:
            return self.play(self.room.read_log(message.log), message.pace, tell)
        plan = message.plan or self.plan
        opening = Opening(
            plan, message.prompt, message.seed, message.world, message.strength,
            image=message.image,
        )  # fmt: skip
        return self.play(self.room.new_log(opening, message.look), message.pace, tell)

    def play(self, log: ActionLog, pace: str, tell: Tell) -> Live:
        """A session that begins with the steps of a log."""
        steps, log.steps = log.steps, []
        size = self.room.bytes_of(log.opening.plan, bool(log.opening.strength))
        live = Live(log, size, self.model.fps, KeyMap.of(self.model), pace)
        self.room.add(live)
        try:
            live.begin_again(log, steps)
            self.room.open_lane(live)
        except BaseException:
            self.room.forget(live)
            raise
        live.tell = tell
        self.metrics.opened.labels("open").inc()
        return live

    def resume(self, message: protocol.Resume, tell: Tell) -> Live:
        """A session that lost its client, or its server; another client of it is sent away."""
        live = self.room.sessions.get(message.session)
        if live is None:
            live = self._saved(message)
            self.room.add(live)
        elif self.find(message.session, message.secret) is None:
            raise TachyscopeError("no session of this name and secret is kept here: open a new one")
        if live.tell is not None:
            live.say(type="closed", reason="another client resumed this session")
        if live.lane is None:
            self.room.make_room(live, live.bytes)
            try:
                self.room.load_newest(live)
            except BaseException:
                self.room.forget(live)
                raise
        live.tell, live.due = tell, time.monotonic()
        self.metrics.opened.labels("resume").inc()
        return live

    def detach(self, tell: Tell) -> None:
        """A client is gone; its session waits for it, at the chunk where it is."""
        for live in list(self.room.sessions.values()):
            if live.tell == tell:
                live.tell, live.used = None, time.monotonic()
                live.inbox.clear()
                self.turns.set_beside(live, "off")
                if live.log.opening.strength:  # its camera is gone
                    self.room.forget(live)
                elif live.chunk and live.chunk not in live.saved:
                    self.keeper.save(live)

    def let_go(self) -> None:
        """Keep no session without a client in memory: another machine may go on with it."""
        for live in list(self.room.sessions.values()):
            if live.tell is None and self.keeper.is_saved(live):
                self.room.forget(live)

    def close(self, live: Live) -> None:
        """The client wants nothing kept."""
        self.room.forget(live)
        self.recording(live.name).unlink(missing_ok=True)
        self.keeper.remove(live)
        self.metrics.ended.labels("closed").inc()

    def _saved(self, message: protocol.Resume) -> Live:
        """A session from its folder."""
        saved = self.keeper.snapshots.find(message.session, message.secret)
        log = self.room.read_log(saved.log)
        size = self.room.bytes_of(log.opening.plan)
        live = Live(
            log, size, self.model.fps, KeyMap.of(self.model),
            name=message.session, secret=message.secret,
        )  # fmt: skip
        live.generation, live.files = saved.generation, saved.files
        return live

    def _run(self) -> None:
        while True:
            with self._wake:
                live = self._next()
                while not (self._stopping or self._calls or live or self.keeper.due):
                    self._wake.wait(self._patience())
                    live = self._next()
                if self._stopping:
                    break
            self._answer_calls()
            live = self._next()  # a call may have ended the one that was due
            if live is not None:
                self.turns.take(live)
            self.keeper.go_on()
            if time.monotonic() - self._swept > SWEEP_S:
                self._sweep()
        self._save_all()

    def _answer_calls(self) -> None:
        """Do what was called for; a turn is next after so long, however much waits."""
        until = time.monotonic() + CALLS_S
        while self._calls and time.monotonic() < until:
            _answer(*self._calls.popleft())

    def _save_all(self) -> None:
        for live in list(self.room.sessions.values()):
            if live.chunk:
                self.keeper.is_saved(live)
            live.say(type="closed", reason="the server is stopping: resume in a minute")
            self.room.forget(live)
        for _, future in self._calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(Full("the server is stopping: come back in a minute"))

    def _next(self) -> Live | None:
        """The session that has been due for longest."""
        now, sessions = time.monotonic(), self.room.sessions.values()
        due = [one for one in sessions if one.ready and one.due <= now]
        if not due:  # there is time for dense models that follow
            due = [one for one in sessions if one.lags]
        return min(due, key=lambda one: one.due, default=None)

    def _patience(self) -> float:
        """Seconds until something is due."""
        now = time.monotonic()
        coming = [one.due for one in self.room.sessions.values() if one.ready]
        return max(0.001, min([*coming, now + 1.0]) - now)

    def _sweep(self) -> None:
        """Forget sessions that nobody came back for."""
        self._swept = time.monotonic()
        for live in list(self.room.sessions.values()):
            if live.tell is None and self._swept - live.used > self.limits.kept_s:
                self.room.forget(live)
                self.metrics.ended.labels("kept").inc()
        self.room.sweep()


def make_engine(
    model: VideoModel,
    name: str,
    snapshots: Snapshots,
    plan: str,
    limits: Limits,
    budget: int | None = None,
    snapshot_chunks: int = SNAPSHOT_CHUNKS,
) -> Engine:
    """An engine as a server runs it; its model's layers are compiled where sessions gain by it."""
    if model.compiling_pays(chunks_for(model, model.shape().chunk, 0, limits.session_frames)):
        model.compile()
    budget = default_budget(model, plan) if budget is None else budget
    return Engine(
        model, name, snapshots, plan=plan, budget=budget, limits=limits, metrics=Metrics(),
        snapshot_chunks=snapshot_chunks,
    )  # fmt: skip


def default_budget(model: VideoModel, plan: str) -> int:
    """Bytes for sessions: what a GPU has left, or half of the machine's memory."""
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
