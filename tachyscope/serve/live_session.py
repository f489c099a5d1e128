"""A session while it is played: its lane, its log and its client's requests."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.types import Chunk
from tachyscope.serve import protocol
from tachyscope.serve.action_log import ActionLog, Opening, Step
from tachyscope.serve.key_map import KeyMap
from tachyscope.serve.lane import Lane
from tachyscope.serve.read_map import ReadMap
from tachyscope.serve.recording import Recording
from tachyscope.serve.snapshots import Saved, hash_secret
from tachyscope.serve.walls import Walls

SPARE = 0.15  # share of the time a chunk is shown that the next one may be late
ASKED = 256  # keys and prompts that may wait for their chunk
RECENT = 16  # chunks whose frames are kept to compare the plan beside with


@dataclass(frozen=True)
class ChunkFrames:
    """Frames of a chunk on their way to a client."""

    header: protocol.Header  # of the first of them
    frames: np.ndarray  # uint8 [F, H, W, 3]
    span_s: float  # seconds over which they are shown
    asked_at: tuple[float, ...] = ()  # arrival times of the keys that they answer


# what a session sends to its client: a text message or pictures
Event = dict[str, Any] | ChunkFrames


@dataclass(eq=False)
class LiveSession:
    """One session. The engine's thread alone calls its methods; others post to its inbox.

    `emit` hands messages to the client, from any thread; None while there is none.
    """

    log: ActionLog
    bytes: int  # memory reserved for its lanes
    fps: float
    key_map: KeyMap
    pace: str = "model"
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    secret: str = field(default_factory=lambda: secrets.token_hex(16))
    generation: int = 0
    lane: Lane | None = None  # None while it waits on disk
    script: deque[Step] = field(default_factory=deque)  # of a log that is played
    inbox: deque[tuple[protocol.Message, float]] = field(default_factory=deque)
    asked: list[tuple[protocol.Message, float]] = field(default_factory=list)  # of the next step
    emit: Callable[[Event], None] | None = None
    paused: bool = False
    ended: str = ""  # why, once it did
    chunk: int = 0
    files: tuple[tuple[int, str], ...] = ()  # of its snapshots, oldest first
    lost: int = 0  # chunks lost with damaged snapshots, until the client gets a notice
    beside: Lane | None = None  # another plan, along the same log
    beside_plan: str = "dense"
    beside_turns: bool = False  # it steps in turns with the session's, not only when there is time
    recent: dict[int, np.ndarray] = field(default_factory=dict)  # last chunks' frames, for it
    due: float = field(default_factory=time.monotonic)
    used: float = field(default_factory=time.monotonic)  # when it last had a client
    kept: bool = True  # on disk
    recording: Recording | None = None
    map: ReadMap | None = None  # watches its lane
    walls: Walls = field(default_factory=Walls)
    beside_walls: Walls = field(default_factory=Walls)
    _held: str = ""
    _shown_until: float = 0.0
    _lead_s: float = 0.0  # from a step's beginning to its frames
    _last: float = 0.0

    @property
    def ready(self) -> bool:
        """Whether it has a message to handle or a chunk to make."""
        return (
            self.emit is not None
            and not self.ended
            and self.lane is not None
            and (bool(self.inbox) or (self.fed and not self.paused))
        )

    @property
    def fed(self) -> bool:
        """Whether the camera that it follows, if any, gave the next chunk's frames."""
        return self.lane is not None and self.lane.fed

    @property
    def saved(self) -> list[int]:
        """After how many chunks its snapshots were taken."""
        return [chunk for chunk, _ in self.files]

    @property
    def lags(self) -> bool:
        """Whether the plan beside is behind the session."""
        return self.beside is not None and self.emit is not None and self.beside.chunk < self.chunk

    def send(self, **message: Any) -> None:
        if self.emit is not None:
            self.emit(message)

    def receipt(self, message: protocol.Message, phase: str, **more: Any) -> None:
        """Send the client a receipt: `phase` is received, applied or refused."""
        self.send(type="receipt", id=message.id, phase=phase, chunk=self.chunk, **more)

    def next_step(self) -> tuple[Step, list[tuple[protocol.Message, float]]]:
        """The next chunk's step, and the messages that it answers.

        Of several keys since the last chunk the newest wins; one that was let go again before any
        chunk saw it still counts, once. Whoever takes the keys ends a log that is played.
        """
        later = [one for one in self.asked if self._is_later(one[0])]
        answered = [one for one in self.asked if not self._is_later(one[0])]
        self.asked = later
        action, prompt, dx, dy = self._held, None, 0, 0
        for message, _ in answered:
            self.script.clear()
            if isinstance(message, protocol.Keys):
                self._held = message.actions
                action = message.actions.strip(".") or action
            elif isinstance(message, protocol.Mouse):
                dx, dy = dx + message.dx, dy + message.dy
            elif isinstance(message, protocol.Prompt):
                prompt = message.text
        action = self.key_map.turned(action, dx, dy)
        if self.script:
            return self.script.popleft(), answered
        return Step(action, prompt), answered

    def ask(self, message: protocol.Message, at: float) -> None:
        """Queue a message for the next step or a later one; raises where too many wait."""
        if len(self.asked) >= ASKED:
            raise TachyscopeError(
                f"{ASKED} keys and prompts wait for their chunk: let some be made first"
            )
        self.asked.append((message, at))

    def _is_later(self, message: protocol.Message) -> bool:
        return isinstance(message, protocol.Prompt) and message.chunk > self.chunk

    def take_up(self, step: Step, made: Chunk, begun: float, shown: float) -> None:
        """Append a finished chunk to the log, and set when the next one is due.

        `begun` and `shown` are the times at which its step began and its frames were ready.
        """
        self.log.steps.append(step)
        self.chunk += 1
        if self.beside is not None:
            self.recent[self.chunk - 1] = made.frames
            for old in list(self.recent)[:-RECENT]:
                del self.recent[old]
        now, frames = time.monotonic(), len(made.frames)
        lead = shown - begun
        self._lead_s = lead if not self._lead_s else 0.8 * self._lead_s + 0.2 * lead
        if self.pace == "free":
            self.due = now
        else:
            self._shown_until = max(shown, self._shown_until) + frames / self.fps
            self.due = self._shown_until - (1 + SPARE) * self._lead_s - SPARE * frames / self.fps
        self.due = max(self.due, now)

    def span(self, frames: int) -> float:
        """Seconds over which a chunk is shown: the interval of chunks, up to four times its own."""
        now = time.monotonic()
        apart, self._last = now - self._last, now
        shown = frames / self.fps
        return min(apart, shown) if self.pace == "free" else min(max(apart, shown), 4 * shown)

    def begin_again(self, log: ActionLog, script: list[Step]) -> None:
        """Start another generation with a new log."""
        self.log, self.script = log, deque(script)
        self.kept = not log.opening.strength  # what a camera showed cannot be gone back to
        self.generation += 1
        self.chunk, self.files, self._shown_until, self._held, self.asked = 0, (), 0.0, "", []
        self.recent.clear()
        self.walls, self.beside_walls = Walls(), Walls()

    def go_back(self, chunk: int) -> None:
        """Start another generation after the first `chunk` steps of the log."""
        self.log.steps = self.log.steps[:chunk]
        self.files = tuple(one for one in self.files if one[0] <= chunk)
        self.generation += 1
        self.chunk, self._shown_until, self._held, self.asked = chunk, 0.0, "", []
        self.script.clear()
        self.recent.clear()
        self.walls, self.beside_walls = Walls(), Walls()

    def close_lanes(self) -> None:
        """Free its memory."""
        for lane in (self.lane, self.beside):
            if lane is not None:
                lane.close()
        self.lane = self.beside = None

    def to_save(self) -> Saved:
        """The session's file, for a snapshot that is taken now."""
        return Saved(hash_secret(self.secret), self.log.to_json(), self.generation, self.files)

    def described(self) -> dict[str, Any]:
        """The fields of `opened` and `began` that describe the session."""
        return {
            "session": self.name,
            "generation": self.generation,
            "chunk": self.chunk,
            "plan": self.log.opening.plan,
            "prompt": self.lane.prompt if self.lane else "",
            "snapshots": self.saved,
            "seed": self.log.opening.seed,
            "world": self.log.opening.world,
            "given": self.log.opening.given,
            "strength": self.log.opening.strength,
            "script": len(self.script),
            "reserved_bytes": self.bytes,
        }


def reopened(opening: Opening, message: protocol.Reset) -> Opening:
    """The opening of a session that is reset: its own, changed by the message's fields."""
    given: dict[str, Any] = {
        name: getattr(message, name) for name in ("plan", "prompt", "seed", "world", "strength")
    }
    changes = {name: value for name, value in given.items() if value is not None}
    if "world" in changes:  # which brings its own prompt and picture
        changes = {"prompt": "", "image": ""} | changes
    return replace(opening, given=0, **changes)
