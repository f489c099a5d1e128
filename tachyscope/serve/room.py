"""Which sessions are in memory, and what each of them may take there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tachyscope.arguments import parse_plan
from tachyscope.errors import TachyscopeError
from tachyscope.machine import memory_of
from tachyscope.memory import ROOM, Need, need
from tachyscope.models.base import VideoModel
from tachyscope.models.registry import MODELS
from tachyscope.serve.action_log import ActionLog, Opening
from tachyscope.serve.keeper import Keeper
from tachyscope.serve.lane import Lane
from tachyscope.serve.limits import Limits
from tachyscope.serve.live import Live

DENSE = "dense"  # the plan that runs beside others


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
        self._needs: dict[str, Need] = {}
        self._meta: VideoModel | None = None

    @property
    def resident(self) -> list[Live]:
        return [one for one in self.sessions.values() if one.lane is not None]

    @property
    def reserved(self) -> int:
        """Bytes of the budget that sessions hold."""
        return sum(one.bytes for one in self.resident)

    def bytes_of(self, plan: str) -> int:
        """What a session of this plan keeps in the device's memory at its longest."""
        predicted = self._need(plan)
        if self.model.device.type == "cpu":
            return predicted.of_video + predicted.host
        # a CUDA graph keeps what a chunk is made with
        return predicted.of_video + predicted.making

    def _need(self, plan: str) -> Need:
        if plan not in self._needs:
            if self._meta is None:
                self._meta = self.model.on_meta()
            self._needs[plan] = need(self._meta, plan, frames=self.limits.session_frames)
        return self._needs[plan]

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

    def new_log(self, opening: Opening) -> ActionLog:
        """An empty log; raises where a session cannot begin so."""
        parse_plan(self.model, opening.plan)
        if opening.world is not None and not MODELS[self.name].world:
            raise TachyscopeError(
                f"model {self.name} has no worlds by number, got {opening.world}: leave it out"
            )
        return ActionLog(self.name, self.model.fingerprint, opening)

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
        self.new_log(log.opening)
        return log

    def add(self, live: Live) -> None:
        """One session more, with memory of its own but no lane yet."""
        if len(self.sessions) >= self.limits.sessions:
            raise Full(
                f"{len(self.sessions)} of {self.limits.sessions} sessions are open: come back later"
            )
        self.make_room(live, live.bytes)
        self.sessions[live.name] = live

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
        live.lane = Lane(self.model, self.name, opening, prompt, opening.plan, watching)

    def open_beside(self, live: Live) -> None:
        """The dense model at the beginning of the log."""
        if live.beside is not None:
            live.beside.close()
        opening = live.log.opening
        live.beside = Lane(self.model, self.name, opening, opening.prompt, DENSE)

    def load(self, live: Live, chunk: int) -> None:
        """Open a lane and have it stand at a snapshot."""
        state: Mapping[str, Tensor] = self.keeper.load(live, chunk)
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
