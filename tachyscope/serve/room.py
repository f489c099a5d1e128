"""Which sessions are in memory, and what each of them may take there."""

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
from tachyscope.serve.keeper import Keeper
from tachyscope.serve.lane import LOOK, TOUR, Lane, can_look
from tachyscope.serve.limits import Limits
from tachyscope.serve.live import Live
from tachyscope.serve.protocol import check_prompt

logger = logging.getLogger("tachyscope.serve")
PLANS = 64  # whose needs are remembered


class Full(TachyscopeError):
    """There is no room now; what a client is told with 503."""


class Room:
    """One model, and the sessions that share its device."""

    def __init__(
        self, model: VideoModel, name: str, keeper: Keeper, budget: int, limits: Limits
    ) -> None:
        """`name` is the model's in the registry, `budget` bytes for sessions' caches."""
        self.model, self.name, self.keeper = model, name, keeper
        self.budget, self.limits = budget, limits
        self.sessions: dict[str, Live] = {}
        self._need = lru_cache(PLANS)(self._predict)  # of a plan's text
        self._meta: VideoModel | None = None

    @property
    def resident(self) -> list[Live]:
        """Sessions whose caches are in memory; from any thread."""
        return [one for one in list(self.sessions.values()) if one.lane is not None]

    @property
    def reserved(self) -> int:
        """Bytes of the budget that sessions hold."""
        return sum(one.bytes for one in self.resident)

    def bytes_of(self, plan: str, follows: bool = False) -> int:
        """What a session of this plan keeps in the device's memory at its longest."""
        predicted = self._need(plan, follows)
        if self.model.device.type == "cpu":
            return predicted.of_video + predicted.host
        return predicted.of_session

    def _predict(self, plan: str, follows: bool = False) -> Need:
        if self._meta is None:
            self._meta = self.model.on_meta()
        return need(self._meta, plan, frames=self.limits.session_frames, follows=follows)

    def check_host(self, plan: str, others: Sequence[Live]) -> None:
        """Raise where host memory beside a GPU does not hold a session's bank beside others'."""
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
        """An empty log, or one that looks around and turns around first; raises where it cannot."""
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
        """An action log that a client handed in, checked."""
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

    def add(self, live: Live) -> None:
        """One session more, with memory of its own but no lane yet.

        Where all are taken it gets the place of one without a client, the longest unused of those
        that lie on disk: its client finds it there.
        """
        left = [one for one in self.sessions.values() if one.tell is None]

        def price(one: Live) -> tuple[bool, bool, float]:
            return one.recording is not None, one.chunk not in one.saved, one.used

        for one in sorted(left, key=price):
            if len(self.sessions) < self.limits.sessions:
                break
            if self.keeper.is_saved(one):
                self.forget(one)
                self.sweep()
        if len(self.sessions) >= self.limits.sessions:
            raise Full(
                f"{len(self.sessions)} of {self.limits.sessions} sessions are open: come back later"
            )
        self.make_room(live, live.bytes)
        self.sessions[live.name] = live

    def sweep(self) -> None:
        """Remove from disk what is too old or too much; open sessions keep what they have there."""
        most = self.limits.sessions + self.limits.kept
        self.keeper.sweep(self.limits.kept_s, most, frozenset(self.sessions))

    def make_room(self, live: Live, size: int) -> None:
        """Have bytes for a session: those without a client go to disk, longest unused first."""
        others = [one for one in self.resident if one is not live]
        free = self.budget - sum(one.bytes for one in others)
        for one in sorted(others, key=lambda one: one.used):
            if free >= size:
                break
            if one.tell is None and self.keeper.is_saved(one):
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

    def open_lane(self, live: Live) -> None:
        """Have it stand where its log ends, or begins: `restore` follows in the first case."""
        opening, prompt = live.log.opening, live.log.prompt_before(live.chunk)
        watching = () if live.map is None else (live.map,)
        live.lane = Lane(self.model, live.log, prompt, opening.plan, watching)

    def open_beside(self, live: Live) -> None:
        """The plan beside at the beginning of the log."""
        if live.beside is not None:
            live.beside.close()
        live.beside = Lane(self.model, live.log, live.log.opening.prompt, live.beside_plan)

    def load_newest(self, live: Live) -> None:
        """Have it stand at its newest snapshot that is whole; what was newer is lost."""
        was = live.saved[-1]
        for chunk in reversed(live.saved):
            try:
                state = self.keeper.load(live, chunk)
            except TachyscopeError as fault:
                logger.warning("session %s: %s", live.name, fault)
                live.files = tuple(one for one in live.files if one[0] < chunk)
                continue
            live.lost = was - chunk
            self.load(live, chunk, state)
            return
        raise TachyscopeError("no snapshot of this session is whole: open a new one")

    def load(self, live: Live, chunk: int, state: Mapping[str, Tensor]) -> None:
        """Open a lane and have it stand at a snapshot."""
        live.chunk, live.log.steps = chunk, live.log.steps[:chunk]
        self.open_lane(live)
        assert live.lane is not None
        live.lane.restore(state, chunk)

    def forget(self, live: Live) -> None:
        """Free its memory; what is on disk stays."""
        self.sessions.pop(live.name, None)
        live.close_lanes()
        if live.recording is not None:
            live.recording.discard()
            live.recording = None
