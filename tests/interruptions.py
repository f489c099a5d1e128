"""Steps of a stream that are interrupted, or that another call comes between; seeded.

A case is a function of its number alone: `python tests/interruptions.py --only 17` runs one again.
Whatever happens in it, a stream refuses in one line, or what it makes is what an undisturbed stream
makes: frames by a chunk's number, and snapshots to the bit.
"""

from __future__ import annotations

import argparse
import functools
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
import toys
from torch import Tensor

import tachyscope as ts
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.observers import Observer

PLANS = [
    ("toy-chunks", "dense"),
    ("toy-chunks", "live"),
    ("toy-chunks", "fast"),
    ("toy-chunks", "balanced"),
    ("toy-tokens", "dense"),
    ("toy-tokens", "fastcar"),
    ("toy-tokens", "passes=draft"),
]
CHUNKS = 5  # in which streams are disturbed
# after as many as fill what `balanced` and `fast` keep resident: their banks then fetch blocks
BEFORE = {"toy-chunks": 8, "toy-tokens": 1}
ASKED = {"prompt": "a", "seed": 3}
CALLS = ("step", "show", "generate", "rollout", "restore", "snapshot")
OTHERS = ("step", "generate", "snapshot", "restore", "rollout")


class Injected(Exception):
    """What an observer or a `show` raises."""


class Raises(Observer):
    """Raises at the n-th call that it is told of, once it is armed."""

    left: int | None = None

    def _tick(self, *told: object) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise Injected("an observer's fault")

    on_pass = on_attend = on_write = on_mlp = on_commit = on_committed = _tick  # type: ignore


class Bench:
    """A model and a plan: what an undisturbed stream makes, and a stream to disturb."""

    def __init__(self, name: str, plan: str) -> None:
        self.model = toys.narrow_chunks() if name == "toy-chunks" else toys.load(name)
        self.plan, self.observer, self.before = plan, Raises(), BEFORE[name]
        with ts.open(self.model, plan, **ASKED) as stream:
            # by number of the chunk that comes next
            self.states: dict[int, dict[str, Tensor]] = {}
            self.frames: list[np.ndarray] = []
            for chunk in range(self.before + CHUNKS + 3):
                if chunk >= self.before:
                    self.states[chunk] = stream.snapshot()
                self.frames.append(stream.step("w").frames)
        self.stream = self._open()
        # events of a step: where it is interrupted
        self.events = {call: self._count(call) for call in CALLS}

    def _open(self) -> ts.Stream:
        return ts.open(self.model, self.plan, observers=[self.observer], **ASKED)

    def _count(self, call: str) -> int:
        self.stream.restore(self.states[self.before])
        counter = At(1 << 60, lambda: None)
        with counter:
            self.call(call, self.before)
        return counter.seen

    def call(self, name: str, at: int, show: Callable[[np.ndarray], None] | None = None) -> None:
        """A call of the stream; whatever it returns must be right."""
        stream = self.stream
        if name == "step":
            self.check(stream.step("w"))
        elif name == "show":
            self.check(stream.step("w", show or (lambda frames: None)))
        elif name == "generate":
            moves = [self.model.actions.index("w")] * stream.next_frames
            self.check(stream.decode(stream.generate(moves)))
        elif name == "rollout":
            frames = stream.next_frames
            for chunk in ts.rollout(
                self.model, frames=frames, actions=f"w*{frames}", stream=stream
            ):
                self.check(chunk)
        elif name == "restore":
            stream.restore(self.states[at])
        elif name == "snapshot":
            self.check_state(stream.snapshot())

    def check(self, chunk: ts.Chunk) -> None:
        assert np.array_equal(chunk.frames, self.frames[chunk.index]), "another video"

    def check_state(self, state: dict[str, Tensor]) -> None:
        index = int(state["kept.chunk"])
        assert same(state, self.states[index]), f"another state before chunk {index}"


class At:
    """Calls `work` at the n-th event of the block: where Python looks for signals."""

    def __init__(self, n: int, work: Callable[[], object]) -> None:
        self.left, self.work, self.seen = n, work, 0

    def __enter__(self) -> At:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *fault: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: object, event: str, arg: object) -> None:
        if event not in ("call", "c_return") or "tachyscope" not in frame.f_code.co_filename:
            return
        self.seen += 1
        self.left -= 1
        if self.left < 0:
            sys.setprofile(None)
            self.work()


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    def bits(x: Tensor) -> Tensor:
        return x.contiguous().view(torch.uint8) if x.dim() else x.reshape(1).view(torch.uint8)

    return a.keys() == b.keys() and all(
        torch.equal(bits(x), bits(b[name])) for name, x in a.items()
    )


@functools.cache
def bench(number: int) -> Bench:
    return Bench(*PLANS[number])


def interrupt() -> None:
    raise KeyboardInterrupt


def refused_or_right(call: Callable[[], object]) -> bool:
    """Whether a call was refused, in one line; what it returns is checked by itself."""
    try:
        call()
    except TachyscopeError as fault:
        assert "\n" not in str(fault), "more than a line"
        return True
    return False


def run(number: int) -> str:
    """One case; what was done and how it ended."""
    rng = random.Random(number)
    here = bench(number % len(PLANS))
    at = here.before + rng.randrange(CHUNKS)
    here.stream.restore(here.states[at])
    kind = rng.choice(("interrupt", "interrupt", "alarm", "fault", "thread", "again"))
    call = rng.choice(CALLS)
    event = rng.randrange(here.events[call])
    try:
        if kind == "interrupt":
            with At(event, interrupt):
                here.call(call, at)
        elif kind == "alarm":
            _alarmed(here, call, at, rng.random())
        elif kind == "fault":
            _faulty(here, at, rng)
        else:
            _shared(here, kind, call, at, event, rng)
        ended = "whole"
    except (KeyboardInterrupt, Injected):
        ended = "interrupted"
    here.observer.left = None
    # whatever was left: it refuses, or is right
    for name in rng.sample(OTHERS[:3] + OTHERS[4:], 2):
        if refused_or_right(lambda name=name: here.call(name, at)):
            ended = f"{ended}, refused"
    # and a restored stream is as if nothing had been
    here.stream.restore(here.states[at])
    here.call("snapshot", at)
    if rng.random() < 0.25:
        here.call("step", at)
    return f"{kind}: {ended}"


def _alarmed(here: Bench, call: str, at: int, part: float) -> None:
    """A real signal, at some time of a step."""
    before = signal.signal(signal.SIGALRM, lambda *_: interrupt())
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-4 + 0.02 * part)
        here.call(call, at)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _faulty(here: Bench, at: int, rng: random.Random) -> None:
    """An exception in `show`, or in an observer."""

    def show(frames: np.ndarray) -> None:
        raise Injected("a fault in show")

    if rng.random() < 0.5:
        here.call("show", at, show)
    else:
        here.observer.left = rng.randrange(20)
        here.call(rng.choice(("step", "generate", "rollout")), at)


def _shared(here: Bench, kind: str, call: str, at: int, event: int, rng: random.Random) -> None:
    """Another call in the midst of one: from a second thread, or from within."""
    other, faults = rng.choice(OTHERS), []

    def beside() -> None:
        try:
            refused_or_right(lambda: here.call(other, at))
        except BaseException as fault:
            faults.append(fault)

    def work() -> None:
        if kind == "again":
            beside()
            return
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()

    with At(event, work):
        refused_or_right(lambda: here.call(call, at))
    if faults:
        raise AssertionError(f"{other} beside {call}: {faults[0]!r}") from faults[0]


def run_all(numbers: Sequence[int]) -> Counter[str]:
    """How cases ended; raises at the first that is wrong."""
    ends: Counter[str] = Counter()
    for number in numbers:
        try:
            ends[run(number)] += 1
        except BaseException as fault:
            raise AssertionError(f"case {number}: {fault!r}") from fault
    return ends


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int)
    asked = parser.parse_args()
    numbers = range(asked.first, asked.first + asked.count)
    if asked.only is not None:
        numbers = range(asked.only, asked.only + 1)
    begun = time.perf_counter()
    for end, count in sorted(run_all(numbers).items()):
        print(f"{count:6} {end}")
    print(f"{len(numbers)} cases in {time.perf_counter() - begun:.1f} s")


if __name__ == "__main__":
    main()
