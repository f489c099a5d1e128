"""The engine cycle by cycle, without its numbers: the same parameters, the same stalls, no RTL.

It follows the control of ``engine.py`` and its parts and knows nothing of their data, so it is some
hundred times faster than the simulated hardware. Tests hold the two equal in every cycle: the
phase, and the cycle of every beat on every port, with stalls on all of them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Any

from tachyscope_fpga.errors import TachyscopeError

if TYPE_CHECKING:
    from tachyscope_fpga.parts.engine import Engine
    from tachyscope_fpga.tools.simulate import Stalls

SCORE, RUN, DRAIN, SEAL = range(4)
NAMES = ("score", "run", "drain", "seal")


@dataclass
class Run:
    """What the model saw: the phase of every cycle, the cycles of every port's beats, the jobs."""

    phases: list[int] = field(default_factory=list)
    cycles: dict[str, list[int]] = field(default_factory=dict)
    jobs: list[tuple[int, int, int]] = field(default_factory=list)
    """(core, row, tile) as they were dealt."""

    @property
    def by_phase(self) -> dict[str, int]:
        counts = Counter(self.phases)
        return {name: counts[number] for number, name in enumerate(NAMES)}

    def utilisation(self, cores: int) -> float:
        """Share of the run phase's cycles in which an array took weights, over all cores."""
        beats = sum(len(seen) for name, seen in self.cycles.items() if name.startswith("weights"))
        running = self.by_phase["run"]
        return beats / (cores * running) if running else 0.0


class _Pipe:
    """A pipeline with an ``Outbox``: what entered at cycle t can be taken from t + latency on."""

    def __init__(self, latency: int, depth: int) -> None:
        self.latency, self.depth = latency, depth
        self.items: deque[tuple[int, Any]] = deque()

    def room(self) -> bool:
        return len(self.items) < self.depth

    def enter(self, now: int, item: Any) -> None:
        self.items.append((now + self.latency, item))

    def ready(self, now: int) -> bool:
        return bool(self.items) and self.items[0][0] <= now

    def take(self) -> Any:
        return self.items.popleft()[1]


class _Core:
    def __init__(self, engine: Engine) -> None:
        core = engine.core
        self.beats, self.tiles_per_job = core.beats, core.tiles_per_job
        self.array = _Pipe(core.array.latency, core.array.latency + 2)
        self.requant = _Pipe(core.requant.LATENCY, core.requant.LATENCY + 2)
        self.beat = self.part = 0
        self.full: tuple[bool, Any] | None = None  # the beat that waits for its activations


def run(
    engine: Engine,
    replays: Sequence[Sequence[bool]],
    stall: Mapping[str, Stalls] | None = None,
    limit: int = 10_000_000,
) -> Run:
    """All steps of `replays` (a flag a row: it replays), with the ports' stall traces.

    Ports are named as in ``simulate``. The run ends with the last result.
    """
    return _Model(engine, replays, dict(stall or {})).run(limit)


class _Model:
    def __init__(
        self, engine: Engine, replays: Sequence[Sequence[bool]], stall: dict[str, Stalls]
    ) -> None:
        rows, cores = engine.rows, engine.cores
        if any(len(flags) != rows for flags in replays):
            raise TachyscopeError(f"every step must have {rows} flags, one a row")
        self.engine, self.replays = engine, replays
        steps = len(replays)
        gate = engine.gate
        self.left: dict[str, float] = {
            "command": steps * rows,
            "score": steps * rows * gate.beats,
            "x": steps * rows * engine.core.beats,
        }
        per_core = [f"{kind}[{core}]" for kind in ("weights", "scale") for core in range(cores)]
        self.left |= dict.fromkeys(per_core, float("inf"))
        self.traces: dict[str, Iterator[bool]] = {
            name: iter(stall.get(name, repeat(False))) for name in (*self.left, "dealt", "o")
        }
        self.found = Run(cycles={name: [] for name in self.traces})
        self.shown = dict.fromkeys(self.left, False)
        # engine
        self.phase, self.row, self.step = SCORE, 0, 0
        self.asked = self.scored = self.x_done = False
        self.score_beats = self.x_beats = self.sealing = 0
        self.out_shown = False
        self.made = 0
        # gate, cache
        self.gate = _Pipe(gate.array.latency, gate.array.latency + 2)
        self.compared = False  # the score at hand with its threshold
        self.hit = False
        self.cache = _Pipe(2, 4)
        self.reading: int | None = None  # tiles fetched of the entry that is read
        # scheduler
        self.dealing = False
        self.waiting: list[tuple[int, int]] = []
        self.replaying: list[int] = []
        self.slots: list[tuple[int, int] | None] = [None] * cores
        self.dealt = False
        self.cores = [_Core(engine) for _ in range(cores)]

    def run(self, limit: int) -> Run:
        engine = self.engine
        total = len(self.replays) * engine.rows * engine.core.tiles
        now = 0
        while len(self.found.cycles["o"]) < total:
            if now >= limit:
                raise TachyscopeError(f"no end after {limit} cycles; stalls leave no way on")
            self.cycle(now)
            now += 1
        return self.found

    def taken(self, name: str, now: int) -> None:
        self.found.cycles[name].append(now)
        if name in self.shown:
            self.shown[name] = False
            self.left[name] -= 1

    def cycle(self, now: int) -> None:
        """One clock cycle: first what is decided from the registers, then their new values."""
        engine = self.engine
        rows, tiles = engine.rows, engine.core.tiles
        for name in self.left:
            waits = next(self.traces[name])
            if not self.shown[name] and not waits and self.left[name] > 0:
                self.shown[name] = True
        o_ready, dealt_ready = (not next(self.traces[name]) for name in ("o", "dealt"))
        self.found.phases.append(self.phase)
        scoring = self.phase == SCORE

        # decided from the registers
        command = self.shown["command"] and scoring
        score = self.shown["score"] and scoring and not self.scored and self.gate.room()
        x = self.shown["x"] and scoring and not self.x_done
        ask = command and not self.asked
        last_row = self.row == rows - 1
        verdict = (
            self.compared and self.hit and (self.x_done or not last_row)
        ) and not self.dealing
        read = self.dealing and bool(self.replaying) and self.reading is None
        fetch = self.reading is not None and self.cache.room()
        accept = (not self.out_shown or o_ready) and self.phase != SEAL

        # cores
        finished = [False] * engine.cores
        results = [core.requant.ready(now) for core in self.cores]
        winner = results.index(True) if any(results) else None
        replayed = winner is None and self.cache.ready(now) and accept
        for number, core in enumerate(self.cores):
            array_room, slot = core.array.room(), self.slots[number]
            weights, scale = f"weights[{number}]", f"scale[{number}]"
            requant = core.array.ready(now) and self.shown[scale] and core.requant.room()
            beat = slot is not None and self.shown[weights] and (core.full is None or array_room)
            held, leaves = core.full, core.full is not None and array_room
            if beat:
                assert slot is not None
                ends = core.beat == core.beats - 1
                core.full = (ends, slot)
                core.beat += 1
                if ends:
                    core.beat = 0
                    core.part += 1
                    if core.part == core.tiles_per_job:
                        core.part = 0
                        finished[number] = True
                self.taken(weights, now)
            elif leaves:
                core.full = None
            if requant:
                core.requant.enter(now, core.array.take())
                self.taken(scale, now)
            if leaves and held is not None and held[0]:
                core.array.enter(now, held[1])
            if number == winner and accept:
                core.requant.take()
        made = accept and winner is not None or replayed

        # results
        if self.out_shown and o_ready:
            self.found.cycles["o"].append(now)
        drained = (
            self.phase == DRAIN and self.made == rows * tiles and (not self.out_shown or o_ready)
        )
        if made:
            self.out_shown = True
            self.made += 1
        elif o_ready:
            self.out_shown = False
        if replayed:
            self.cache.take()

        # scheduler
        grant = None
        over = (
            not self.waiting
            and not self.replaying
            and all(slot is None or done for slot, done in zip(self.slots, finished, strict=True))
            and not self.dealt
        )
        stop = self.dealing and over
        if self.dealing and (not self.dealt or dealt_ready):
            for number, slot in enumerate(self.slots):
                job = engine.scheduler._next(self.waiting, number)
                if job is not None and (slot is None or finished[number]):
                    grant = (number, job)
                    break
        for number, done in enumerate(finished):
            if done:
                self.slots[number] = None
        if self.dealt and dealt_ready:
            self.found.cycles["dealt"].append(now)
            self.dealt = False
        if grant is not None:
            number, job = grant
            self.waiting.remove(job)
            self.slots[number] = job
            self.dealt = True
            self.found.jobs.append((number, *job))

        # cache
        if fetch:
            assert self.reading is not None
            self.cache.enter(now, None)
            self.reading = None if self.reading == tiles - 1 else self.reading + 1
        if read:
            self.replaying.pop(0)
            self.reading = 0
        if ask:
            self.hit = self.asked = True

        # scores and activations
        if score:
            self.taken("score", now)
            self.score_beats += 1
            if self.score_beats % engine.gate.beats == 0:
                self.gate.enter(now, None)
            self.scored = self.score_beats == engine.gate.beats * rows
        if x:
            self.taken("x", now)
            self.x_beats += 1
            self.x_done = self.x_beats == engine.core.beats * rows
        self.compared = not verdict if self.compared else command and self.gate.ready(now)
        if verdict:
            self.gate.take()
            self.taken("command", now)
            self.hit = self.asked = False
            units = tiles // engine.scheduler.tiles_per_job
            if self.replays[self.step][self.row]:
                self.replaying.append(self.row)
            else:
                self.waiting += [(self.row, unit) for unit in range(units)]
            self.row += 1
            if last_row:
                self.row = 0
                self.dealing, self.phase = True, RUN
                self.scored = self.x_done = False
                self.score_beats = self.x_beats = 0

        # phases
        if self.phase == RUN and not self.dealing:
            self.phase = DRAIN
        elif drained:
            self.phase, self.made = SEAL, 0
        elif self.phase == SEAL:
            self.sealing += 1
            if self.sealing == rows:
                self.phase, self.sealing = SCORE, 0
                self.step += 1
        if stop:
            self.dealing = False
