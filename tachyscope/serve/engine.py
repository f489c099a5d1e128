"""One thread that owns the model: it opens sessions and steps them in turns.

A turn is one chunk of one session. The session that has been due for longest is next, so none
starves. Sessions with a client are resident: their caches and CUDA graphs stay in memory. One that
lost its client stays too until its memory is needed, and then waits as a snapshot on disk.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, TypeVar

from torch import Tensor

from tachyscope.arguments import parse_plan
from tachyscope.errors import TachyscopeError, is_out_of_memory
from tachyscope.memory import need
from tachyscope.models.base import VideoModel
from tachyscope.models.registry import MODELS
from tachyscope.serve import protocol
from tachyscope.serve.action_log import ActionLog, Opening, Step
from tachyscope.serve.lane import Lane
from tachyscope.serve.limits import Limits
from tachyscope.serve.live import Live, Show, Told, reopened
from tachyscope.serve.metrics import Metrics
from tachyscope.serve.snapshots import Saved, Snapshots, hash_secret
from tachyscope.types import Chunk
from tachyscope.video import VideoWriter

T = TypeVar("T")
SNAPSHOT_CHUNKS = 32  # between two snapshots
SWEEP_S = 60.0

logger = logging.getLogger("tachyscope.serve")


class Full(TachyscopeError):
    """There is no room now; what a client is told with 503."""


class _Discarded(Exception):
    """A recording that nobody will fetch."""


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
        self.model, self.name, self.snapshots = model, name, snapshots
        self.plan, self.budget, self.limits, self.metrics = plan, budget, limits, metrics
        self.snapshot_chunks = snapshot_chunks
        parse_plan(model, plan)
        self.sessions: dict[str, Live] = {}
        self._sizes: dict[str, int] = {}
        self._meta: VideoModel | None = None
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._swept = time.monotonic()
        self._recordings = Path()  # once it is started
        self._writer = ThreadPoolExecutor(1, "tachyscope-snapshots")
        self._thread = threading.Thread(target=self._run, name="tachyscope-engine", daemon=True)
        metrics.budget.set(budget)

    def start(self) -> None:
        self._recordings = Path(mkdtemp(prefix="tachyscope-"))
        self.snapshots.sweep(self.limits.kept_s)
        self._thread.start()

    def stop(self) -> None:
        """Save every session, and end the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()
        self._writer.shutdown()
        shutil.rmtree(self._recordings, ignore_errors=True)

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

    # what follows runs in the engine's thread

    def open(self, message: protocol.Open, tell: Callable[[Told], None]) -> Live:
        """A new session; raises `Full` where there is no room."""
        if message.log is not None:
            log = self.read_log(message.log)
        else:
            opening = Opening(
                message.plan or self.plan, message.prompt, message.seed, message.world
            )
            log = ActionLog(self.name, self.model.fingerprint, opening)
        steps, log.steps = log.steps, []
        self._check_opening(log.opening)
        if len(self.sessions) >= self.limits.sessions:
            raise Full(
                f"{len(self.sessions)} of {self.limits.sessions} sessions are open: come back later"
            )
        live = Live(log, self.bytes_of(log.opening.plan), self.model.fps, message.pace)
        self._make_room(live)
        live.lane = self._lane(live)
        live.begin_again(log, steps)
        live.tell, self.sessions[live.name] = tell, live
        self.metrics.opened.labels("open").inc()
        return live

    def resume(self, message: protocol.Resume, tell: Callable[[Told], None]) -> Live:
        """A session that lost its client, or its server; another client of it is sent away."""
        live = self.sessions.get(message.session)
        if live is None:
            live = self._saved(message)
        elif hash_secret(live.secret) != hash_secret(message.secret):
            raise TachyscopeError("no session of this name and secret is kept here: open a new one")
        if live.tell is not None:
            live.tell({"type": "closed", "reason": "another client resumed this session"})
        if live.lane is None:
            self._make_room(live)
            self._load(live, live.saved[-1])
        live.tell, live.due, self.sessions[live.name] = tell, time.monotonic(), live
        self.metrics.opened.labels("resume").inc()
        return live

    def detach(self, tell: Callable[[Told], None]) -> None:
        """A client is gone; its session waits for it, at the chunk where it is."""
        for live in self.sessions.values():
            if live.tell == tell:
                live.tell, live.used = None, time.monotonic()
                live.inbox.clear()
                if live.chunk and live.chunk not in live.saved:
                    self.save(live)

    def close(self, live: Live) -> None:
        """The client wants nothing kept."""
        self._forget(live)
        self._writer.submit(self.snapshots.remove, live.name)
        self.metrics.ended.labels("closed").inc()

    def read_log(self, value: Any) -> ActionLog:
        """An action log that a client handed in, checked."""
        log = ActionLog.from_json(
            value, self.name, self.model.fingerprint, self.model.actions or ""
        )
        if len(log.steps) > self.limits.session_frames:
            raise TachyscopeError(
                f"an action log has at most {self.limits.session_frames} steps here, got "
                f"{len(log.steps)}"
            )
        return log

    def bytes_of(self, plan: str) -> int:
        """What a session of this plan keeps in memory at its longest."""
        if plan not in self._sizes:
            if self._meta is None:
                self._meta = self.model.on_meta()
            found = need(self._meta, plan, frames=self.limits.session_frames)
            self._sizes[plan] = sum(found.cache.values()) + found.prompt
        return self._sizes[plan]

    def save(self, live: Live) -> None:
        """Write a snapshot; on a thread of its own, so that no session waits for a disk."""
        if live.lane is None or live.saving:
            self.metrics.snapshots.labels("skipped").inc()
            return
        state, saved, chunk = live.lane.stream.snapshot(), live.to_save(), live.chunk
        live.saving = True
        self._writer.submit(self._write, live, saved, chunk, state)

    def _is_saved(self, live: Live) -> bool:
        """Whether a session lies on disk as it is; it is written now if it does not."""
        for _ in range(2):  # the first time another may be under way
            if live.chunk not in live.saved:
                self.save(live)
                self._writer.submit(lambda: None).result()
        return live.chunk in live.saved

    def _write(self, live: Live, saved: Saved, chunk: int, state: Mapping[str, Tensor]) -> None:
        try:
            size = self.snapshots.save(live.name, saved, chunk, state)
        except OSError as fault:
            self.metrics.snapshots.labels("failed").inc()
            reason = (fault.strerror or str(fault)).lower()
            logger.warning("snapshot of session %s failed: %s", live.name, reason)
            live.say(
                type="notice",
                code="snapshot_failed",
                message=f"the last snapshot could not be written ({reason}): the session goes on, "
                f"and after a fault resumes from an older one",
            )
        else:
            self.metrics.snapshots.labels("written").inc()
            self.metrics.snapshot_bytes.inc(size)
            if live.generation == saved.generation:
                live.saved = (*(one for one in saved.chunks if one < chunk), chunk)
        finally:
            live.saving = False

    def _run(self) -> None:
        while True:
            with self._wake:
                live = self._next()
                while not (self._stopping or self._calls or live):
                    self._wake.wait(self._patience())
                    live = self._next()
                if self._stopping:
                    break
                calls, self._calls = self._calls, deque()
            for work, future in calls:
                _answer(work, future)
            if live is not None and not calls:
                self._turn(live)
            if time.monotonic() - self._swept > SWEEP_S:
                self._sweep()
        for live in list(self.sessions.values()):
            if live.chunk and live.chunk not in live.saved:
                self.save(live)
            live.say(type="closed", reason="the server is stopping: resume in a minute")
            self._forget(live)
        for _, future in self._calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(Full("the server is stopping: come back in a minute"))

    def _next(self) -> Live | None:
        """The session that has been due for longest."""
        now = time.monotonic()
        due = [one for one in self.sessions.values() if one.ready and one.due <= now]
        return min(due, key=lambda one: one.due, default=None)

    def _patience(self) -> float:
        """Seconds until something is due."""
        coming = [one.due for one in self.sessions.values() if one.ready]
        return max(0.001, min([*coming, time.monotonic() + 1.0]) - time.monotonic())

    def _turn(self, live: Live) -> None:
        """One session's turn: its messages, then a chunk unless it is paused."""
        try:
            if not live.paused:
                self.metrics.wait_s.observe(time.monotonic() - live.due)
            self._obey(live)
            if live.paused:
                live.due = time.monotonic()
                return
            self._step(live)
        except Exception as fault:  # whatever it is, the other sessions go on
            told = isinstance(fault, TachyscopeError)
            if not told:
                logger.exception("a step of session %s failed", live.name)
            words = str(fault) if told else f"a step failed ({type(fault).__name__})"
            if is_out_of_memory(fault):
                words = "the memory is not enough for this session"
            self._end(live, "failed", words)

    def _obey(self, live: Live) -> None:
        """Do what messages ask for; keys and prompts are the next step's."""
        while live.inbox:
            message, at = live.inbox.popleft()
            if isinstance(message, protocol.Keys | protocol.Prompt):
                live.asked.append((message, at))
                continue
            try:
                self._do(live, message)
            except TachyscopeError as fault:
                live.receipt(message, "refused", reason=str(fault))
            else:
                live.receipt(message, "applied")

    def _do(self, live: Live, message: protocol.Message) -> None:
        if isinstance(message, protocol.Pause):
            live.paused = message.paused
        elif isinstance(message, protocol.Record):
            self._record(live, message.on)
        elif isinstance(message, protocol.GetLog):
            live.say(type="log", id=message.id, log=live.log.to_json())
        elif isinstance(message, protocol.Reset):
            self._begin_again(live, reopened(live.log, message), [])
        elif isinstance(message, protocol.Replay):
            log = self.read_log(message.log)
            steps, log.steps = log.steps, []
            self._begin_again(live, log, steps)

    def _record(self, live: Live, on: bool) -> None:
        if on and live.recorder is None:
            path = self.recording(live.name)
            live.recorder = VideoWriter(path, self.model.fps, background=True)
            live.recorder.__enter__()
        elif not on and live.recorder is not None:
            recorder, live.recorder = live.recorder, None
            recorder.__exit__(None, None, None)
            live.say(type="recorded", frames=recorder.frames)

    def recording(self, name: str) -> Path:
        """Where a session's recording lies, once it is finished."""
        return self._recordings / f"{name}.mp4"

    def _begin_again(self, live: Live, log: ActionLog, steps: list[Step]) -> None:
        assert live.lane is not None
        self._check_opening(log.opening)
        live.lane.stream.read_prompt(log.opening.prompt)
        size = self.bytes_of(log.opening.plan)
        self._make_room(replace(live, log=log, bytes=size), instead_of=live)
        live.lane.close()  # else the old and the new would be in memory together
        live.begin_again(log, steps)
        live.bytes, live.lane = size, self._lane(live)
        live.say(type="began", **live.described())

    def _step(self, live: Live) -> None:
        lane = live.lane
        assert lane is not None
        if lane.frames >= self.limits.session_frames:
            self._end(
                live,
                "length",
                f"a session has at most {self.limits.session_frames} frames here: reset it, or "
                f"open another",
            )
            return
        step, answered = live.next_step()
        if step.prompt is not None:
            try:
                lane.stream.read_prompt(step.prompt)
            except TachyscopeError as fault:
                for message, _ in answered:
                    if isinstance(message, protocol.Prompt):
                        live.receipt(message, "refused", reason=str(fault))
                answered = [one for one in answered if not isinstance(one[0], protocol.Prompt)]
                step = step._replace(prompt=None)
        before, begun = lane.frames, time.monotonic()
        made = lane.step(step)
        took = time.monotonic() - begun
        for message, _ in answered:
            live.receipt(message, "applied")
        keys = tuple(at for message, at in answered if isinstance(message, protocol.Keys))
        self._tell_chunk(live, lane, step, made, took, before, keys)
        live.take_up(step, made, took)
        if live.recorder is not None:
            live.recorder.write(made.frames)
        if live.chunk % self.snapshot_chunks == 0:
            self.save(live)

    def _tell_chunk(
        self,
        live: Live,
        lane: Lane,
        step: Step,
        made: Chunk,
        took: float,
        before: int,
        keys: tuple[float, ...],
    ) -> None:
        frames, stats = len(made.frames), made.stats
        self.metrics.steps.labels("main").inc()
        self.metrics.made.inc(frames)
        self.metrics.step_s.observe(took)
        self.metrics.count(stats)
        held, dense = int(1e6 * stats["cache_mb"]), lane.dense_bytes()
        self.metrics.cache.labels("held").set(held)
        self.metrics.cache.labels("dense").set(dense)
        rows = stats.get("rows_computed", 0.0) + stats.get("rows_replayed", 0.0)
        live.say(
            type="chunk",
            generation=live.generation,
            chunk=live.chunk,
            frame=before,
            frames=frames,
            actions=step.actions,
            prompt=step.prompt,
            step_ms=round(1e3 * took, 3),
            cache_bytes=held,
            dense_cache_bytes=dense,
            pairs=stats.get("pairs", 0.0),
            dense_pairs=stats.get("pairs_dense", 0.0),
            mlp_share=stats.get("rows_computed", 0.0) / rows if rows else 1.0,
        )
        if live.tell is not None:
            header = protocol.Header(
                protocol.VERSION, 0, protocol.MAIN, 0, live.generation, live.chunk, before
            )
            live.tell(Show(header, made.frames, live.span(frames), keys))

    def _end(self, live: Live, why: str, words: str) -> None:
        live.ended = why
        self.metrics.ended.labels(why).inc()
        live.say(type="error", code=why, message=words)
        live.say(type="closed", reason=words)
        self._forget(live)

    def _forget(self, live: Live) -> None:
        """Free its memory; what is on disk stays."""
        self.sessions.pop(live.name, None)
        if live.recorder is not None:
            with suppress(_Discarded):
                live.recorder.__exit__(_Discarded, _Discarded(), None)
            live.recorder = None
        self.recording(live.name).unlink(missing_ok=True)
        if live.lane is not None:
            live.lane.close()
            live.lane = None

    def _check_opening(self, opening: Opening) -> None:
        parse_plan(self.model, opening.plan)
        if opening.world is not None and not MODELS[self.name].world:
            raise TachyscopeError(
                f"model {self.name} has no worlds by number, got {opening.world}: leave it out"
            )

    def _lane(self, live: Live) -> Lane:
        opening = live.log.opening
        prompt = live.log.prompt_before(live.chunk)
        return Lane(self.model, self.name, opening, prompt, opening.plan)

    def _saved(self, message: protocol.Resume) -> Live:
        """A session from its folder."""
        saved = self.snapshots.find(message.session, message.secret)
        log = ActionLog.from_json(
            saved.log, self.name, self.model.fingerprint, self.model.actions or ""
        )
        live = Live(
            log,
            self.bytes_of(log.opening.plan),
            self.model.fps,
            name=message.session,
            secret=message.secret,
        )
        live.generation, live.saved = saved.generation, saved.chunks
        return live

    def _load(self, live: Live, chunk: int) -> None:
        """Open a lane and have it stand at a snapshot."""
        state = self.snapshots.load(live.name, live.generation, chunk)
        live.chunk, live.log.steps = chunk, live.log.steps[:chunk]
        live.lane = self._lane(live)
        live.lane.restore(state, chunk)

    def _make_room(self, live: Live, instead_of: Live | None = None) -> None:
        """Have bytes for a session: those without a client go to disk, longest unused first."""
        resident = [
            one for one in self.sessions.values() if one.lane is not None and one is not instead_of
        ]
        free = self.budget - sum(one.bytes for one in resident)
        for one in sorted(resident, key=lambda one: one.used):
            if free >= live.bytes:
                return
            if one.tell is None and self._is_saved(one):
                assert one.lane is not None
                one.lane.close()
                one.lane = None
                free += one.bytes
        if free < live.bytes:
            self.metrics.refused.labels("memory").inc()
            raise Full(
                f"a session of plan {live.log.opening.plan} and {self.limits.session_frames} "
                f"frames takes {live.bytes / 1e6:.1f} MB, and {free / 1e6:.1f} of "
                f"{self.budget / 1e6:.1f} MB are free beside {len(resident)} others: come back "
                f"later, or take a plan with a smaller budget"
            )

    def _sweep(self) -> None:
        """Forget sessions that nobody came back for; count those that there are."""
        self._swept = time.monotonic()
        for live in list(self.sessions.values()):
            if live.tell is None and self._swept - live.used > self.limits.kept_s:
                self._forget(live)
                self.metrics.ended.labels("kept").inc()
        self._writer.submit(self.snapshots.sweep, self.limits.kept_s)

    def count(self) -> None:
        """Bring the gauges up to date."""
        found = list(self.sessions.values())
        played = sum(one.tell is not None for one in found)
        resident = [one for one in found if one.lane is not None]
        self.metrics.sessions.labels("playing").set(played)
        self.metrics.sessions.labels("resident").set(len(resident))
        self.metrics.sessions.labels("on_disk").set(len(found) - len(resident))
        self.metrics.reserved.set(sum(one.bytes for one in resident))


def _answer(work: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as fault:
        future.set_exception(fault)
