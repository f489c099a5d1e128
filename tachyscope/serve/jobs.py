"""Videos that are made in the background, as in OpenAI's `/v1/videos`."""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tachyscope.core.arguments import parse_actions
from tachyscope.core.errors import TachyscopeError, shown
from tachyscope.core.limits import whole
from tachyscope.serve.action_log import Opening, Step
from tachyscope.serve.engine import Engine
from tachyscope.serve.live_session import Event, LiveSession
from tachyscope.serve.protocol import check_prompt, check_text
from tachyscope.serve.recording import NOT_RECORDED, Recording
from tachyscope.serve.session_pool import Full

logger = logging.getLogger("tachyscope.serve")
FIELDS = ("prompt", "model", "seconds", "size", "plan", "seed", "world", "actions")
SECONDS = re.compile(r"[0-9]{1,5}(\.[0-9]{1,3})?")
RETRY_S = 1.0  # until a job that found no free slot tries again


@dataclass(eq=False)
class Job:
    """One video."""

    opening: Opening
    actions: tuple[int, ...]
    frames: int
    seconds: str
    size: str
    owner: str = ""  # who may see it
    name: str = field(default_factory=lambda: f"video_{secrets.token_hex(12)}")
    status: str = "queued"
    made: int = 0  # frames
    created: float = field(default_factory=time.time)
    completed: float | None = None
    fault: str = ""
    live: LiveSession | None = None

    def to_json(self, model: str) -> dict[str, Any]:
        error = {"code": "failed", "message": self.fault} if self.fault else None
        return {
            "id": self.name,
            "object": "video",
            "model": model,
            "status": self.status,
            "progress": 100 * self.made // self.frames,
            "created_at": int(self.created),
            "completed_at": None if self.completed is None else int(self.completed),
            "expires_at": None,
            "prompt": self.opening.prompt,
            "seconds": self.seconds,
            "size": self.size,
            "remixed_from_video_id": None,
            "error": error,
        }


class Jobs:
    """Videos one after another; each shares the engine with the sessions, a chunk a turn."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.jobs: dict[str, Job] = {}
        self._lock = threading.RLock()
        self._timer: threading.Timer | None = None

    def create(self, given: Mapping[str, Any], name: str = "", owner: str = "") -> Job:
        """Queue a video, under a new name unless one is given; raises if it cannot be made."""
        engine, limits = self.engine, self.engine.limits
        job = self._parse(given)
        job.name, job.owner = name or job.name, owner
        size = engine.pool.bytes_of(job.opening.plan)
        if size > engine.pool.budget:
            raise Full(
                f"a video of plan {job.opening.plan} takes {size / 1e6:.1f} MB, and this server "
                f"has {engine.pool.budget / 1e6:.1f} MB: take a plan with a smaller budget"
            )
        with self._lock:
            self._sweep()
            if len(self.jobs) >= limits.jobs:
                raise Full(
                    f"{len(self.jobs)} of {limits.jobs} videos are kept here: delete one, or come "
                    f"back later"
                )
            self.jobs[job.name] = job
        self._start_next()
        return job

    def find(self, name: str) -> Job:
        with self._lock:
            if name not in self.jobs:
                raise KeyError(name)
            return self.jobs[name]

    def listed(self) -> list[Job]:
        """Newest first."""
        with self._lock:
            return sorted(self.jobs.values(), key=lambda one: -one.created)

    def delete(self, name: str) -> Job:
        """Delete a video; one in progress is stopped."""
        with self._lock:
            job = self.find(name)
            del self.jobs[name]
        if job.status == "in_progress":
            self.engine.call(lambda: self._close(job)).result()
        self.path(job).unlink(missing_ok=True)
        self._start_next()
        return job

    def path(self, job: Job) -> Path:
        return self.engine.recording(job.name)

    def count(self) -> None:
        """Update the gauges."""
        with self._lock:
            states = [job.status for job in self.jobs.values()]
        for state in ("queued", "in_progress", "completed", "failed"):
            self.engine.metrics.jobs.labels(state).set(states.count(state))

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _parse(self, given: Mapping[str, Any]) -> Job:
        engine, model = self.engine, self.engine.model
        unknown = sorted(set(given) - set(FIELDS))
        if unknown:
            raise TachyscopeError(f"a video takes {', '.join(FIELDS)}, got {shown(unknown[0])}")
        texts = {name: str(value) for name, value in given.items() if value is not None}
        for text in texts.values():
            check_text(text)
        prompt = texts.get("prompt", "")
        check_prompt(prompt, engine.limits)
        if texts.get("model", engine.name) != engine.name:
            raise TachyscopeError(f"here is model {engine.name}, got {shown(texts['model'])}")
        size = f"{model.size[1]}x{model.size[0]}"
        if texts.get("size", size) != size:
            raise TachyscopeError(f"videos here are {size}, got {shown(texts['size'])}")
        seconds = texts.get("seconds", "4")
        frames = round(float(seconds) * model.fps) if SECONDS.fullmatch(seconds) else 0
        if not 0 < frames <= engine.limits.job_frames:
            most = engine.limits.job_frames / model.fps
            raise TachyscopeError(f"seconds are over 0 and at most {most:g}, got {shown(seconds)}")
        opening = Opening(
            texts.get("plan", engine.plan),
            prompt,
            whole(texts.get("seed", "0"), "seed"),
            whole(texts["world"], "world") if "world" in texts else None,
        )
        engine.pool.new_log(opening)
        moves = parse_actions(texts.get("actions", ""), model.actions, frames)
        return Job(opening, tuple(moves), frames, seconds, size)

    def _start_next(self) -> None:
        with self._lock:
            if any(job.status == "in_progress" for job in self.jobs.values()):
                return
            queued = [job for job in self.jobs.values() if job.status == "queued"]
            if not queued:
                return
            job = queued[0]
            job.status = "in_progress"
        self.engine.call(lambda: self._begin(job))

    def _begin(self, job: Job) -> None:
        """Open the job's session; in the engine's thread."""

        def emit(event: Event) -> None:
            if isinstance(event, dict):
                self._on_event(job, event)

        if self.jobs.get(job.name) is not job:  # it was deleted meanwhile
            return
        try:
            job.live = self.engine.play(self.engine.pool.new_log(job.opening), "free", emit)
            job.live.script.extend(_steps(job, job.live))
            job.live.kept = False
            job.live.recording = Recording(self.path(job), job.live.fps, job.frames)
        except Full:
            job.status = "queued"
            self._timer = threading.Timer(RETRY_S, self._start_next)
            self._timer.daemon = True
            self._timer.start()
        except Exception as fault:
            self._fail(job, fault)

    def _on_event(self, job: Job, event: dict[str, Any]) -> None:
        if event["type"] == "chunk":
            job.made = min(job.frames, job.made + event["frames"])
            if job.made == job.frames:
                self.engine.call(lambda: self._finish(job))
        elif event["type"] == "error":
            self._end(job, event["message"])
        elif event.get("code") == NOT_RECORDED:
            self.engine.call(lambda: self._fail(job, TachyscopeError(event["message"])))

    def _finish(self, job: Job) -> None:
        live = job.live
        if live is not None and live.recording is not None:
            recording, live.recording = live.recording, None
            try:
                recording.finish()
            except Exception as fault:
                self._fail(job, fault)
                return
            self._end(job, "")
            self.engine.close(live)

    def _close(self, job: Job) -> None:
        if job.live is not None:
            self.engine.close(job.live)

    def _fail(self, job: Job, fault: Exception) -> None:
        """End a video that cannot be made; the next one begins."""
        words = str(fault)
        if not isinstance(fault, TachyscopeError):
            logger.error("video %s failed", job.name, exc_info=fault)
            words = "the server failed at this video, and its log has why"
        self._close(job)
        self._end(job, words)

    def _end(self, job: Job, fault: str) -> None:
        job.fault, job.live = fault, None
        job.status = "failed" if fault else "completed"
        job.completed = time.time()
        self._start_next()

    def _sweep(self) -> None:
        """Forget videos that were finished long ago."""
        for job in list(self.jobs.values()):
            if job.completed and time.time() - job.completed > self.engine.limits.kept_s:
                self.path(job).unlink(missing_ok=True)
                del self.jobs[job.name]


def _steps(job: Job, live: LiveSession) -> list[Step]:
    """A job's actions, one a frame, as steps of chunks; after the last action it stands still."""
    assert live.lane is not None
    model, session = live.lane.stream.model, live.lane.stream.session
    steps: list[Step] = []
    start = model.pixel_frames(session.memory.latent_frame)
    done, latents = 0, session.memory.latent_frame
    while done < job.frames:
        latents += session.shape.chunk
        upto = model.pixel_frames(latents) - start
        moves = [*job.actions[done:upto], *[0] * (upto - max(done, len(job.actions)))]
        steps.append(Step("".join(model.actions[i] for i in moves) if model.actions else ""))
        done = upto
    return steps
