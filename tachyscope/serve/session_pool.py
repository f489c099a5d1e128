"""The open sessions of a model, and the memory reserved for each."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tachyscope.core.arguments import parse_plan
from tachyscope.core.errors import TachyscopeError
from tachyscope.io.machine import memory_of
from tachyscope.memory.predict import ROOM, Need, need
from tachyscope.models.base import VideoModel
from tachyscope.models.registry import MODELS
from tachyscope.serve.action_log import ActionLog, Opening, Step
from tachyscope.serve.lane import LOOK, TOUR, Lane, can_look
from tachyscope.serve.limits import Limits
from tachyscope.serve.live_session import LiveSession
from tachyscope.serve.protocol import check_prompt
from tachyscope.serve.snapshot_writer import SnapshotWriter

logger = logging.getLogger("tachyscope.serve")
PLANS = 64  # size of the cache of predicted needs


class Full(TachyscopeError):
    """No free slot or memory now: a client gets code 503."""


class SessionPool:
    """The sessions that share one model and its device."""

    def __init__(
        self, model: VideoModel, name: str, writer: SnapshotWriter, budget: int, limits: Limits
    ) -> None:
        """`name` is the model's in the registry, `budget` bytes for sessions' caches."""
        self.model, self.name, self.writer = model, name, writer
        self.budget, self.limits = budget, limits
        self.sessions: dict[str, LiveSession] = {}
        self._need = lru_cache(PLANS)(self._predict)  # of a plan's text
        self._meta: VideoModel | None = None

    @property
    def resident(self) -> list[LiveSession]:
        """Sessions whose caches are in memory; from any thread."""
        return [one for one in list(self.sessions.values()) if one.lane is not None]

    @property
    def reserved(self) -> int:
        """Bytes of the budget that sessions hold."""
        return sum(one.bytes for one in self.resident)

    def bytes_of(self, plan: str, follows: bool = False) -> int:
        """Bytes of device memory that a session of this plan holds at its longest."""
        predicted = self._need(plan, follows)
        if self.model.device.type == "cpu":
            return predicted.of_video + predicted.host
        return predicted.of_session

    def _predict(self, plan: str, follows: bool = False) -> Need:
        if self._meta is None:
            self._meta = self.model.on_meta()
        return need(self._meta, plan, frames=self.limits.session_frames, follows=follows)

    def check_host(self, plan: str, others: Sequence[LiveSession]) -> None:
        """Raise `Full` where host memory beside a GPU does not hold one more session's bank."""
        needed, most = self._need(plan).host, memory_of(torch.device("cpu"))
        if self.model.device.type == "cpu" or not needed or most is None:
            return
        free = int(ROOM * most) - sum(self._need(one.log.opening.plan).host for one in others)
        if free < needed:
            raise Full(
                f"a session of plan {plan} takes {needed / 1e9:.1f} GB of host memory, and "
                f"{max(0, free) / 1e9:.1f} GB are free beside {len(others)} others: come back "
                f"later, or take plan live, or a bank with a smaller budget"
            )

    def new_log(self, opening: Opening, look: bool = False) -> ActionLog:
        """A new log; with `look` its first steps show the world and turn around in it."""
        if look:
            opening = replace(opening, given=len(LOOK))
        parse_plan(self.model, opening.plan)
        if opening.world is not None and not MODELS[self.name].world:
            raise TachyscopeError(
                f"model {self.name} has no worlds by number, got {opening.world}: leave it out"
            )
        if opening.image and opening.world is not None:
            raise TachyscopeError("a world brings its own picture: leave image or world out")
        if opening.given and (opening.world is None or not can_look(self.name)):
            raise TachyscopeError(
                f"model {self.name} is shown around in worlds by number alone, and only where a "
                f"frame is a whole step: leave look out"
            )
        if opening.strength:
            self.model.check_source()
        steps = [Step(action) for action in LOOK + TOUR] if look else []
        return ActionLog(self.name, self.model.fingerprint, opening, steps)

    def read_log(self, value: Any) -> ActionLog:
        """Parse and check a client's action log."""
        log = ActionLog.from_json(
            value, self.name, self.model.fingerprint, self.model.actions or ""
        )
        if len(log.steps) > self.limits.session_frames:
            raise TachyscopeError(
                f"an action log has at most {self.limits.session_frames} steps here, got "
                f"{len(log.steps)}"
            )
        for text in (log.opening.prompt, *(step.prompt or "" for step in log.steps)):
            check_prompt(text, self.limits)
        self.new_log(log.opening)
        return log

    def add(self, live: LiveSession) -> None:
        """Add a session and reserve its memory; its lane is opened later.

        Without a free slot the longest unused session without a client leaves the pool; it stays
        on disk, where its client can resume it.
        """
        left = [one for one in self.sessions.values() if one.emit is None]

        def price(one: LiveSession) -> tuple[bool, bool, float]:
            return one.recording is not None, one.chunk not in one.saved, one.used

        for one in sorted(left, key=price):
            if len(self.sessions) < self.limits.sessions:
                break
            if self.writer.ensure_saved(one):
                self.forget(one)
                self.sweep()
        if len(self.sessions) >= self.limits.sessions:
            raise Full(
                f"{len(self.sessions)} of {self.limits.sessions} sessions are open: come back later"
            )
        self.reserve(live, live.bytes)
        self.sessions[live.name] = live

    def sweep(self) -> None:
        """Remove old and surplus sessions from disk; those of open sessions stay."""
        most = self.limits.sessions + self.limits.kept
        self.writer.sweep(self.limits.kept_s, most, frozenset(self.sessions))

    def reserve(self, live: LiveSession, size: int) -> None:
        """Reserve bytes for a session; those without a client go to disk, longest unused first."""
        others = [one for one in self.resident if one is not live]
        free = self.budget - sum(one.bytes for one in others)
        for one in sorted(others, key=lambda one: one.used):
            if free >= size:
                break
            if one.emit is None and self.writer.ensure_saved(one):
                one.close_lanes()
                free += one.bytes
        if free < size:
            raise Full(
                f"a session of plan {live.log.opening.plan} and {self.limits.session_frames} "
                f"frames takes {size / 1e6:.1f} MB, and {free / 1e6:.1f} of "
                f"{self.budget / 1e6:.1f} MB are free beside {len(others)} others: come back "
                f"later, or take a plan with a smaller budget"
            )
        self.check_host(live.log.opening.plan, [x for x in others if x.lane is not None])
        live.bytes = size

    def open_lane(self, live: LiveSession) -> None:
        """Open the lane of a session at its present chunk; past chunk 0 `restore` must follow."""
        opening, prompt = live.log.opening, live.log.prompt_before(live.chunk)
        watching = () if live.map is None else (live.map,)
        live.lane = Lane(self.model, live.log, prompt, opening.plan, watching)

    def open_beside(self, live: LiveSession) -> None:
        """Open the lane of the plan beside, at the beginning of the log."""
        if live.beside is not None:
            live.beside.close()
        live.beside = Lane(self.model, live.log, live.log.opening.prompt, live.beside_plan)

    def load_newest(self, live: LiveSession) -> None:
        """Load the newest snapshot that is whole; newer chunks are lost."""
        was = live.saved[-1]
        for chunk in reversed(live.saved):
            try:
                state = self.writer.load(live, chunk)
            except TachyscopeError as fault:
                logger.warning("session %s: %s", live.name, fault)
                live.files = tuple(one for one in live.files if one[0] < chunk)
                continue
            live.lost = was - chunk
            self.load(live, chunk, state)
            return
        raise TachyscopeError("no snapshot of this session is whole: open a new one")

    def load(self, live: LiveSession, chunk: int, state: Mapping[str, Tensor]) -> None:
        """Open the session's lane at a snapshot."""
        live.chunk, live.log.steps = chunk, live.log.steps[:chunk]
        self.open_lane(live)
        assert live.lane is not None
        live.lane.restore(state, chunk)

    def forget(self, live: LiveSession) -> None:
        """Drop a session from the pool and free its memory; its files stay."""
        self.sessions.pop(live.name, None)
        live.close_lanes()
        if live.recording is not None:
            live.recording.discard()
            live.recording = None
