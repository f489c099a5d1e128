"""A session's turn: its messages, one chunk, and one chunk of the plan beside."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tachyscope.core.arguments import parse_plan
from tachyscope.core.errors import TachyscopeError, is_out_of_memory
from tachyscope.core.types import Chunk
from tachyscope.measure.quality import psnr
from tachyscope.serve import protocol
from tachyscope.serve.action_log import ActionLog, Step
from tachyscope.serve.lane import Lane
from tachyscope.serve.live_session import ChunkFrames, LiveSession, reopened
from tachyscope.serve.metrics import Metrics
from tachyscope.serve.read_map import ReadMap
from tachyscope.serve.recording import NOT_RECORDED, Recording
from tachyscope.serve.session_pool import SessionPool
from tachyscope.serve.walls import Walls

logger = logging.getLogger("tachyscope.serve")


class SessionRunner:
    """Runs the turns of a pool's sessions, in the engine's thread alone."""

    def __init__(
        self,
        pool: SessionPool,
        metrics: Metrics,
        snapshot_chunks: int,
        recording: Callable[[str], Path],
    ) -> None:
        """`recording` gives the path of a session's mp4 by its name."""
        self.pool, self.writer, self.metrics = pool, pool.writer, metrics
        self.snapshot_chunks, self.recording = snapshot_chunks, recording

    def run_turn(self, live: LiveSession) -> None:
        """Run one session's turn; an error ends this session alone."""
        try:
            costly = self._handle_messages(live)
            now = time.monotonic()
            waits = live.paused or not live.fed
            if costly or waits:  # a costly message is a whole turn: queue again behind the others
                live.due = now
            elif live.due <= now:
                self._step(live, now - live.due)
                if live.lags and live.beside_turns:
                    self._step_beside(live)
                return
            if live.lags:
                self._step_beside(live)
        except Exception as fault:
            expected = isinstance(fault, TachyscopeError)
            if not expected:
                logger.exception("a step of session %s failed", live.name)
            words = str(fault) if expected else f"a step failed ({type(fault).__name__})"
            if is_out_of_memory(fault):
                words = "the memory is not enough for this session"
            self._end(live, "failed", words)

    def set_beside(self, live: LiveSession, mode: str, plan: str = "dense") -> None:
        """Start, replace or stop the plan beside."""
        if mode != "off" and live.log.opening.strength:
            raise TachyscopeError(
                "a session that follows a camera has no plan beside it: reset it with strength 0"
            )
        live.beside_turns = mode == "turns"
        had = 0 if live.beside is None else self.pool.bytes_of(live.beside_plan)
        if mode == "off":
            live.bytes -= had
            self._close_beside(live)
        elif not had or plan != live.beside_plan:
            parse_plan(self.pool.model, plan)
            self.pool.reserve(live, live.bytes - had + self.pool.bytes_of(plan))
            self._close_beside(live)
            live.beside_plan, live.beside_walls = plan, Walls()
            self.pool.open_beside(live)

    def _close_beside(self, live: LiveSession) -> None:
        if live.beside is not None:
            live.beside.close()
            live.beside = None

    def _handle_messages(self, live: LiveSession) -> bool:
        """Handle messages up to the first costly one; returns whether there was one.

        Keys, mouse and prompts are queued for the next step.
        """
        while live.inbox:
            message, at = live.inbox.popleft()
            asks = isinstance(message, protocol.Keys | protocol.Mouse | protocol.Prompt)
            try:
                if asks:
                    live.ask(message, at)
                else:
                    self._apply(live, message)
            except TachyscopeError as fault:
                live.receipt(message, "refused", reason=str(fault))
            else:
                if not asks:  # it is applied when its chunk is made
                    live.receipt(message, "applied")
            if isinstance(message, protocol.COSTLY):
                return True
        return False

    def _apply(self, live: LiveSession, message: protocol.Message) -> None:
        match message:
            case protocol.Pause():
                live.paused = message.paused
            case protocol.GetLog():
                live.send(type="log", id=message.id, log=live.log.to_json())
            case protocol.Reset():
                opening = reopened(live.log.opening, message)
                log = self.pool.new_log(opening, message.look)
                steps, log.steps = log.steps, []
                self._begin_again(live, log, steps)
            case protocol.Replay():
                log = self.pool.read_log(message.log)
                steps, log.steps = log.steps, []
                self._begin_again(live, log, steps)
            case protocol.Rewind():
                self._rewind(live, message.chunk)
            case protocol.Beside():
                self.set_beside(live, message.mode, message.plan)
            case protocol.Map():
                self._set_map(live, message.on)
            case protocol.Record():
                self._record(live, message.on)

    def _begin_again(self, live: LiveSession, log: ActionLog, steps: list[Step]) -> None:
        assert live.lane is not None
        live.lane.stream.read_prompt(log.opening.prompt)  # raises while all is as it was
        size = self.pool.bytes_of(log.opening.plan, bool(log.opening.strength))
        if live.beside is not None:
            size += self.pool.bytes_of(live.beside_plan)
        self.pool.reserve(live, size)
        live.lane.close()  # else the old and the new would be in memory together
        live.begin_again(log, steps)
        self.pool.open_lane(live)
        if live.beside is not None:
            self.pool.open_beside(live)
        live.send(type="began", **live.described())

    def _rewind(self, live: LiveSession, wanted: int) -> None:
        earlier = [chunk for chunk in live.saved if chunk <= wanted]
        if not earlier:
            kept = ", ".join(map(str, live.saved)) or "none yet"
            raise TachyscopeError(f"there is no snapshot before chunk {wanted}: kept are {kept}")
        assert live.lane is not None
        state = self.writer.load(live, earlier[-1])  # raises while all is as it was
        live.lane.close()
        live.go_back(earlier[-1])
        self.pool.load(live, earlier[-1], state)
        if live.beside is not None and live.beside.chunk > live.chunk:
            self.pool.open_beside(live)
        live.send(type="began", **live.described())

    def _set_map(self, live: LiveSession, on: bool) -> None:
        """Turn the live map on or off: the lane is reopened with or without its observer."""
        if on == (live.map is not None):
            return
        assert live.lane is not None
        state = live.lane.stream.snapshot()
        live.lane.close()
        live.map = ReadMap() if on else None
        self.pool.open_lane(live)
        live.lane.restore(state, live.chunk)

    def _record(self, live: LiveSession, on: bool) -> None:
        if on and live.recording is None:
            path, most = self.recording(live.name), self.pool.limits.session_frames
            live.recording = Recording(path, live.fps, most)
        elif not on and live.recording is not None:
            recording, live.recording = live.recording, None
            live.send(type="recorded", frames=recording.finish())

    def _write_recording(self, live: LiveSession, frames: np.ndarray) -> None:
        """Append a chunk's frames to the recording, if any; the session survives a failure."""
        if live.recording is None:
            return
        try:
            live.recording.write(frames)
        except TachyscopeError as fault:
            live.recording.discard()
            live.recording = None
            live.send(
                type="notice",
                code=NOT_RECORDED,
                message=f"{fault}: the session goes on without it",
            )

    def _step(self, live: LiveSession, waited: float) -> None:
        """Make the next chunk; `waited` is how long it was due."""
        lane, most = live.lane, self.pool.limits.session_frames
        assert lane is not None
        if lane.frames >= most:
            words = f"a session has at most {most} frames here: reset it, or open another"
            self._end(live, "length", words)
            return
        step, answered = live.next_step()
        if step.prompt is not None:
            try:
                lane.stream.read_prompt(step.prompt)
            except TachyscopeError as fault:
                step = step._replace(prompt=None)
                for message, _ in answered:
                    if isinstance(message, protocol.Prompt):
                        live.receipt(message, "refused", reason=str(fault))
                answered = [one for one in answered if not isinstance(one[0], protocol.Prompt)]
        before, begun, shown = lane.frames, time.monotonic(), 0.0
        place = {"generation": live.generation, "chunk": live.chunk}
        keys = tuple(at for message, at in answered if isinstance(message, protocol.Keys))

        def show(frames: np.ndarray) -> None:
            """Send the frames before the clean pass and the cache's upkeep."""
            nonlocal shown
            shown = time.monotonic()
            self.metrics.made.inc(len(frames))
            for message, _ in answered:
                live.receipt(message, "applied")
            live.send(
                type="pose", **place, pose=lane.pose, given=live.chunk < live.log.opening.given
            )
            self._send_frames(live, protocol.MAIN, live.chunk, before, frames, keys)

        made = lane.step(step, show)
        self.metrics.wait_s.observe(waited)
        _see_wall(live.walls, lane, live.chunk, step, made)
        self._report_chunk(live, lane, step, made, time.monotonic() - begun, waited, before)
        if live.map is not None:
            live.send(type="map", **place, **live.map.take())
        live.take_up(step, made, begun, shown)
        self._write_recording(live, made.frames)
        if live.chunk % self.snapshot_chunks == 0:
            self.writer.save(live)

    def _report_chunk(
        self,
        live: LiveSession,
        lane: Lane,
        step: Step,
        made: Chunk,
        took: float,
        waited: float,
        before: int,
    ) -> None:
        stats = made.stats
        self.metrics.steps.labels("main").inc()
        self.metrics.step_s.observe(took)
        self.metrics.count(stats)
        held, dense = int(1e6 * stats["cache_mb"]), lane.dense_bytes()
        self.metrics.cache.labels("held").set(held)
        self.metrics.cache.labels("dense").set(dense)
        rows = stats.get("rows_computed", 0.0) + stats.get("rows_replayed", 0.0)
        live.send(
            type="chunk",
            generation=live.generation,
            chunk=live.chunk,
            frame=before,
            frames=len(made.frames),
            actions=step.actions,
            prompt=step.prompt,
            step_ms=round(1e3 * took, 3),
            wait_ms=round(1e3 * waited, 3),
            cache_bytes=held,
            dense_cache_bytes=dense,
            pairs=stats.get("pairs", 0.0),
            dense_pairs=stats.get("pairs_dense", 0.0),
            mlp_share=stats.get("rows_computed", 0.0) / rows if rows else 1.0,
            given=lane.gives,
            pose=lane.pose,
            read=lane.read_poses(),
        )

    def _step_beside(self, live: LiveSession) -> None:
        """Make one chunk of the plan beside, by the same step of the log."""
        lane = live.beside
        assert lane is not None
        chunk, before, begun = lane.chunk, lane.frames, time.monotonic()
        made = lane.step(live.log.steps[chunk])
        took = time.monotonic() - begun
        _see_wall(live.beside_walls, lane, chunk, live.log.steps[chunk], made)
        self.metrics.steps.labels("beside").inc()
        self.metrics.made.inc(len(made.frames))
        shown = live.recent.pop(chunk, None)
        close = None if shown is None else [round(float(x), 2) for x in psnr(shown, made.frames)]
        live.send(
            type="beside",
            generation=live.generation,
            chunk=chunk,
            frame=before,
            frames=len(made.frames),
            behind=live.chunk - lane.chunk,
            step_ms=round(1e3 * took, 3),
            psnr=close,
        )
        self._send_frames(live, protocol.BESIDE, chunk, before, made.frames, ())

    def _send_frames(
        self,
        live: LiveSession,
        lane: int,
        chunk: int,
        frame: int,
        frames: np.ndarray,
        keys: tuple[float, ...],
    ) -> None:
        if live.emit is not None:
            header = protocol.Header(protocol.VERSION, 0, lane, 0, live.generation, chunk, frame)
            span = live.span(len(frames)) if lane == protocol.MAIN else 0.0
            live.emit(ChunkFrames(header, frames, span, keys))

    def _end(self, live: LiveSession, why: str, words: str) -> None:
        live.ended = why
        self.metrics.ended.labels(why).inc()
        live.send(type="error", code=why, message=words)
        live.send(type="closed", reason=words)
        self.pool.forget(live)


def _see_wall(walls: Walls, lane: Lane, chunk: int, step: Step, made: Chunk) -> None:
    """Keep the last frame of a chunk that the model drew facing a wall straight on."""
    if not lane.gives and (wall := lane.facing) is not None:
        walls.see(wall, chunk, step, made.frames[-1])
