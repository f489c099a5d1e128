"""What clients and server say to each other over a WebSocket, version 1 (docs/serve.md).

Text messages are JSON objects with a `type`. A client's are the dataclasses below, checked here
before anything else sees them. Binary messages are pictures: 16 bytes of header, then the file.
"""

from __future__ import annotations

import dataclasses
import io
import json
import struct
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from tachyscope.bounds import ASKED
from tachyscope.errors import TachyscopeError, shown
from tachyscope.serve.limits import Limits

VERSION = 1
SUBPROTOCOL = f"tachyscope.v{VERSION}"
FORMATS = ("png", "jpeg", "webp")
# version, format, lane, flags, generation, chunk, frame
HEADER = struct.Struct("<BBBBIII")
MAIN, DENSE = 0, 1  # lanes
LAST = 1  # flag of a chunk's last frame
MAX_INT = 2**31 - 1


@dataclass(frozen=True)
class Message:
    """A client's message; `id` comes back in its receipts."""

    id: int = 0
    type: ClassVar[str] = ""


@dataclass(frozen=True)
class Open(Message):
    """Begin a session. What is left out is the server's default."""

    type: ClassVar[str] = "open"
    plan: str | None = None
    prompt: str = ""
    seed: int = 0
    world: int | None = None  # an unseen room by number, which brings its own prompt
    format: Literal["jpeg", "webp", "png"] = "jpeg"
    quality: int = 85
    pace: Literal["model", "free"] = "model"  # the model's frames a second, or all that can be made
    log: dict[str, Any] | None = None  # play an action log instead: it says how to begin


@dataclass(frozen=True)
class Resume(Message):
    """Go on with a session whose connection was lost, from its last snapshot at worst."""

    type: ClassVar[str] = "resume"
    session: str = ""
    secret: str = ""
    format: Literal["jpeg", "webp", "png"] = "jpeg"
    quality: int = 85


@dataclass(frozen=True)
class Keys(Message):
    """The action that is held from now on, by its letter; "" for none."""

    type: ClassVar[str] = "keys"
    actions: str = ""


@dataclass(frozen=True)
class Prompt(Message):
    """Another prompt, from the next chunk on."""

    type: ClassVar[str] = "prompt"
    text: str = ""


@dataclass(frozen=True)
class Pause(Message):
    """Stop before the next chunk, or go on."""

    type: ClassVar[str] = "pause"
    paused: bool = True


@dataclass(frozen=True)
class Reset(Message):
    """Begin again, with what is given here instead of what was."""

    type: ClassVar[str] = "reset"
    plan: str | None = None
    prompt: str | None = None
    seed: int | None = None
    world: int | None = None


@dataclass(frozen=True)
class Replay(Message):
    """Begin again and play an action log."""

    type: ClassVar[str] = "replay"
    log: dict[str, Any] | None = None


@dataclass(frozen=True)
class Rewind(Message):
    """Go back to the newest snapshot of at most so many chunks, and take another way from there."""

    type: ClassVar[str] = "rewind"
    chunk: int = 0


@dataclass(frozen=True)
class Beside(Message):
    """Run the dense model along the same log: in turns with the plan, or when there is time."""

    type: ClassVar[str] = "beside"
    mode: Literal["off", "turns", "follow"] = "off"


@dataclass(frozen=True)
class Map(Message):
    """Tell with every chunk what was read, merged, replayed and fetched; costs CUDA graphs."""

    type: ClassVar[str] = "map"
    on: bool = True


@dataclass(frozen=True)
class Record(Message):
    """Write every frame from now on into an mp4, or finish it."""

    type: ClassVar[str] = "record"
    on: bool = True


@dataclass(frozen=True)
class GetLog(Message):
    """Send the action log."""

    type: ClassVar[str] = "log"


@dataclass(frozen=True)
class Close(Message):
    """End the session; nothing of it is kept."""

    type: ClassVar[str] = "close"


MESSAGES: dict[str, type[Message]] = {
    one.type: one
    for one in (
        Open,
        Resume,
        Keys,
        Prompt,
        Pause,
        Reset,
        Replay,
        Rewind,
        Beside,
        Map,
        Record,
        GetLog,
        Close,
    )
}
BOUNDS = {
    "id": (0, MAX_INT),
    "seed": (ASKED["seed"].low, 2**53 - 1),  # what JavaScript's numbers hold
    "world": (ASKED["world"].low, ASKED["world"].high),
    "quality": (1, 100),
    "chunk": (0, MAX_INT),
}
LETTERS = {"plan": 500, "session": 64, "secret": 64, "actions": 256}


def parse(text: str, limits: Limits) -> Message:
    """A client's message; raises in one line where it is none."""
    if len(text) > limits.log_bytes:
        raise TachyscopeError(f"a message has at most {limits.log_bytes} bytes, got {len(text)}")
    value = read_json(text)
    if len(text) > limits.message_bytes and value.get("log") is None:
        raise TachyscopeError(
            f"a message without a log has at most {limits.message_bytes} bytes, got {len(text)}"
        )
    kind = value.pop("type", None)
    if not isinstance(kind, str) or kind not in MESSAGES:
        raise TachyscopeError(
            f"a message has one of the types {', '.join(MESSAGES)}, got {_told(kind)}"
        )
    fields = MESSAGES[kind]
    hints = typing.get_type_hints(fields)
    known = {field.name for field in dataclasses.fields(fields)}
    for name, part in value.items():
        if name not in known:
            raise TachyscopeError(
                f"message {kind!r} takes {', '.join(sorted(known))}, got {shown(name)}"
            )
        _check(kind, name, part, hints[name])
    for name in ("prompt", "text"):
        given = value.get(name)
        if isinstance(given, str) and len(given) > limits.prompt_letters:
            raise TachyscopeError(
                f"a prompt has at most {limits.prompt_letters} letters here, got {len(given)}: "
                f"shorten it"
            )
    return fields(**value)


def read_json(text: str | bytes) -> dict[str, Any]:
    """A JSON object; raises in one line where the text is none."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise TachyscopeError("a message is a JSON object, got something else") from None
    if not isinstance(value, dict):
        raise TachyscopeError(f"a message is a JSON object, got {_told(value)}")
    return value


def write_json(value: Mapping[str, Any]) -> str:
    """A message of the server's."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)  # NaN and Infinity are no JSON


def _check(kind: str, name: str, value: Any, hint: Any) -> None:
    """Raise unless a field's value is of its type and within its bounds."""
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and types.NoneType in allowed:
        return
    (wanted,) = (one for one in allowed if one is not types.NoneType)
    choices = typing.get_args(wanted) if typing.get_origin(wanted) is Literal else ()
    plain = typing.get_origin(wanted) or wanted
    right = value in choices if choices else type(value) is plain
    if choices and not isinstance(value, str):
        right = False
    if not right:
        names = {int: "a whole number", str: "text", bool: "true or false", dict: "an object"}
        rule = " or ".join(choices) if choices else names[plain]
        raise TachyscopeError(f"{name!r} of message {kind!r} is {rule}, got {_told(value)}")
    if name in BOUNDS and not BOUNDS[name][0] <= value <= BOUNDS[name][1]:
        low, high = BOUNDS[name]
        raise TachyscopeError(
            f"{name!r} of message {kind!r} is from {low} to {high:.0f}, got {_told(value)}"
        )
    if name in LETTERS and len(value) > LETTERS[name]:
        raise TachyscopeError(
            f"{name!r} of message {kind!r} has at most {LETTERS[name]} letters, got {len(value)}"
        )


def _told(value: Any) -> str:
    """A value of JSON for an error; a very long number or text is cut."""
    if isinstance(value, int) and value.bit_length() > 64:
        return "a very long number"
    try:
        return shown(value) if isinstance(value, str) else shown(json.dumps(value))[1:-1]
    except (RecursionError, ValueError):
        return "something too deep"


class Header(NamedTuple):
    """What stands before a picture."""

    version: int
    format: int  # index in FORMATS
    lane: int
    flags: int
    generation: int  # of the session; a reset begins another
    chunk: int  # steps since the session began
    frame: int  # frames since then

    def pack(self) -> bytes:
        return HEADER.pack(*self)

    @classmethod
    def read(cls, message: bytes) -> tuple[Header, bytes]:
        """The header of a binary message, and the picture's file."""
        return cls(*HEADER.unpack_from(message)), message[HEADER.size :]


def encode(frame: np.ndarray, kind: str, quality: int) -> bytes:
    """A frame uint8 [H, W, 3] as a file."""
    from PIL import Image  # an engine without clients needs none

    file = io.BytesIO()
    picture = Image.fromarray(frame)
    if kind == "png":
        picture.save(file, "PNG", compress_level=1)
    elif kind == "webp":
        picture.save(file, "WEBP", quality=quality, method=0)
    else:
        # full chroma: a small world's thin coloured edges would smear
        picture.save(file, "JPEG", quality=quality, subsampling=0)
    return file.getvalue()
