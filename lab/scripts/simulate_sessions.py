"""How many GPUs so many sessions need: a discrete-event simulation (SimPy) of turns and of a fleet.

    python bench/simulate_sessions.py --out out/scale.json

Two models, the second fed by the first. *One replica*: N sessions in turns, as tachyscope/serve
steps them (the one due for longest is next), chunk by chunk; the most sessions of which fewer than
1 % of chunks come late. *A fleet*: sessions arrive, play, pause and leave; a machine dies now and
then and its sessions resume elsewhere; replicas are added until fewer than 0.1 % of arrivals are
refused. What is measured and what is assumed is printed with the result.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import simpy

ARRIVALS = 20_000  # counted, at least


@dataclass(frozen=True)
class Load:
    """What is measured of a model and plan on a machine, and what is assumed of its players."""

    step_s: float  # measured: a chunk, decoding included
    spread: float  # measured: standard deviation of a step over its mean
    frames: int  # of a chunk
    fps: float
    session_gb: float  # what a session reserves, by `tachyscope bench fit`
    budget_gb: float  # what a GPU has left for sessions
    playing: float = 0.7  # assumed: share of a session that is not paused
    length_s: float = 360.0  # assumed: mean, exponential
    failures_per_day: float = 0.05  # assumed: of a machine
    down_s: float = 300.0  # assumed: until a dead machine is back

    @property
    def period_s(self) -> float:
        """How long a chunk is shown."""
        return self.frames / self.fps


def late_share(load: Load, sessions: int, seconds: float, seed: int) -> float:
    """Share of chunks that come after the last one was shown, with so many playing on a replica."""
    rng, env = random.Random(seed), simpy.Environment()
    gpu = simpy.PriorityResource(env)
    made = late = 0

    def play() -> Any:
        nonlocal made, late
        yield env.timeout(rng.uniform(0, load.period_s))
        deadline = env.now + load.period_s
        while True:
            with gpu.request(priority=deadline) as turn:  # due for longest, first
                yield turn
                yield env.timeout(load.step_s * max(0.2, rng.gauss(1, load.spread)))
            made += 1
            late += env.now > deadline
            # behind time, the picture stands; ahead of it, the session waits for its turn
            deadline = max(deadline, env.now) + load.period_s
            yield env.timeout(max(0.0, deadline - 2 * load.period_s - env.now))

    for _ in range(sessions):
        env.process(play())
    env.run(seconds)
    return late / max(1, made)


def playing_at_once(load: Load, seed: int) -> int:
    """The most sessions that one replica plays with under 1 % of chunks late."""
    most = math.floor(load.period_s / load.step_s)
    while most > 0 and late_share(load, most, 600.0, seed) > 0.01:
        most -= 1
    return most


class Fleet:
    """Replicas with so many slots each; a session goes to the one that holds fewest."""

    def __init__(self, replicas: int, slots: int) -> None:
        self.slots = slots
        self.held: list[set[int]] = [set() for _ in range(replicas)]
        self.up = [True] * replicas
        self.where: dict[int, int] = {}
        self.arrived = self.refused = self.moved = self.lost = 0
        self._order = [(0, i) for i in range(replicas)]  # a heap, with old notes in it

    def take(self, session: int) -> bool:
        """Whether there was room."""
        while self._order:
            count, i = self._order[0]
            if count != len(self.held[i]) or not self.up[i]:
                heapq.heappop(self._order)
                continue
            if count >= self.slots:
                return False
            self.held[i].add(session)
            self.where[session] = i
            self._note(i)
            return True
        return False

    def leave(self, session: int) -> None:
        i = self.where.pop(session, None)
        if i is not None:  # else its machine died and nobody had room
            self.held[i].discard(session)
            self._note(i)

    def fail(self, i: int) -> None:
        """A machine dies; each of its sessions resumes elsewhere, if there is room."""
        self.up[i], sessions = False, self.held[i]
        self.held[i] = set()
        for session in sessions:
            del self.where[session]
            self.moved += 1
            self.lost += not self.take(session)

    def back(self, i: int) -> None:
        self.up[i] = True
        self._note(i)

    def _note(self, i: int) -> None:
        heapq.heappush(self._order, (len(self.held[i]), i))


def refusals(load: Load, wanted: int, replicas: int, slots: int, seed: int) -> Fleet:
    """A fleet that `wanted` sessions use at once on average; its second half is counted."""
    rng, env = random.Random(seed), simpy.Environment()
    fleet, names = Fleet(replicas, slots), count()
    # enough arrivals to tell 0.1 % from none
    end = max(4.0, 2 * ARRIVALS / wanted) * load.length_s

    def arrive() -> Any:
        # begin with a full house: what arrives later finds it as it would be
        for _ in range(wanted):
            env.process(stay())
        while True:
            yield env.timeout(rng.expovariate(wanted / load.length_s))
            env.process(stay())

    def stay() -> Any:
        counted = env.now > end / 2
        fleet.arrived += counted
        session = next(names)
        if not fleet.take(session):
            fleet.refused += counted
            return
        yield env.timeout(rng.expovariate(1 / load.length_s))
        fleet.leave(session)

    def break_down() -> Any:
        rate = replicas * load.failures_per_day / 86_400
        while True:
            yield env.timeout(rng.expovariate(rate))
            i = rng.randrange(replicas)
            if fleet.up[i]:
                fleet.fail(i)
                env.process(mend(i))

    def mend(i: int) -> Any:
        yield env.timeout(load.down_s)
        fleet.back(i)

    env.process(arrive())
    env.process(break_down())
    env.run(end)
    return fleet


def fewest_replicas(load: Load, wanted: int, slots: int, seed: int) -> tuple[int, Fleet]:
    """The fewest replicas that refuse under 0.1 % of arrivals."""
    # what a room of that size wants beyond the mean is a few standard deviations of arrivals
    low, high = wanted // slots, math.ceil((wanted + 6 * math.sqrt(wanted)) / slots) + 4
    best = refusals(load, wanted, high, slots, seed)
    while high - low > max(1, high // 200):
        middle = (low + high) // 2
        outcome = refusals(load, wanted, middle, slots, seed)
        if outcome.refused <= 0.001 * max(1, outcome.arrived):
            high, best = middle, outcome
        else:
            low = middle
    return high, best


# results/wan-rollouts.json, one H200, 12 frames a chunk: `live` with a tiny decoder; 276 ms
# undecoded and 155 of Wan's VAE (decoded); dense after 118 s. GB: what a session reserves.
TINY, VAE, DENSE = (0.281, 6.9), (0.431, 8.7), (2.857, 135.8)
LOADS = {
    name: Load(step_s, 0.03, 12, fps, session_gb, 125.0)
    for name, (step_s, session_gb), fps in (
        ("tiny decoder, 16 frames/s", TINY, 16.0),
        ("tiny decoder, 8 frames/s", TINY, 8.0),
        ("Wan's VAE, 16 frames/s", VAE, 16.0),
        ("Wan's VAE, 8 frames/s", VAE, 8.0),
        ("dense after 118 s, 16 frames/s", DENSE, 16.0),
    )
}


def simulate(name: str, load: Load, wanted: list[int], seed: int) -> dict[str, Any]:
    """One row: a replica, then fleets for so many sessions."""
    at_once = playing_at_once(load, seed)
    in_memory = math.floor(load.budget_gb / load.session_gb)
    # those that pause take memory and no time; three standard deviations of who plays are left
    slots = min(in_memory, at_once)
    while slots < in_memory:
        mean = (slots + 1) * load.playing
        if mean + 3 * math.sqrt(mean * (1 - load.playing)) > at_once:
            break
        slots += 1
    row: dict[str, Any] = {"name": name, **asdict(load), "playing_at_once": at_once}
    row |= {"in_memory": in_memory, "sessions_per_gpu": slots, "fleets": []}
    for sessions in wanted if slots else []:
        replicas, fleet = fewest_replicas(load, sessions, slots, seed)
        row["fleets"].append(
            {
                "sessions": sessions,
                "gpus": replicas,
                "refused": fleet.refused / max(1, fleet.arrived),
                "moved": fleet.moved,
                "lost": fleet.lost,
            }
        )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", default="100,1000,100000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    wanted = [int(word) for word in given.sessions.split(",")]
    rows = []
    for name, load in LOADS.items():
        rows.append(simulate(name, load, wanted, given.seed))
        print(json.dumps(rows[-1], indent=1), flush=True)
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps({"schema": 1, "suite": "scale", "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
