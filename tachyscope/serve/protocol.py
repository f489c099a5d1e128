"""The WebSocket protocol of clients and server, version 1 (docs/serve.md).

Text messages are JSON objects with a `type`. A client's are the dataclasses below, checked here
before anything else sees them. Binary messages are pictures: 16 bytes of header, then the file.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import struct
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from tachyscope.core.errors import TachyscopeError, shown, spelled
from tachyscope.core.limits import ASKED
from tachyscope.serve.limits import Limits

VERSION = 1
SUBPROTOCOL = f"tachyscope.v{VERSION}"
FORMATS = ("png", "jpeg", "webp", "h264")
# version, format, lane, flags, generation, chunk, frame
HEADER = struct.Struct("<BBBBIII")
MAIN, BESIDE = 0, 1  # lanes
LAST, KEY = 1, 2  # flags: a chunk's last frame; one that needs none before it
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
    format: Literal["jpeg", "webp", "png", "h264"] = "jpeg"
    quality: int = 85
    pace: Literal["model", "free"] = "model"  # the model's frames a second, or all that can be made
    log: dict[str, Any] | None = None  # play an action log instead: it says how to begin
    look: bool = False  # the world is shown first, and then turned around in (`lane.LOOK`, `TOUR`)
    # noise on the pictures that the client sends of its camera, and the session follows; 0: none
    strength: float = 0.0
    image: str = ""  # a picture to begin with: a JPEG, PNG or WebP file in base64


@dataclass(frozen=True)
class Resume(Message):
    """Go on with a session whose connection was lost, from its last snapshot at worst."""

    type: ClassVar[str] = "resume"
    session: str = ""
    secret: str = ""
    format: Literal["jpeg", "webp", "png", "h264"] = "jpeg"
    quality: int = 85


@dataclass(frozen=True)
class Keys(Message):
    """The keys held from now on: an action's letter, two keys that are one action, or none."""

    type: ClassVar[str] = "keys"
    actions: str = ""


@dataclass(frozen=True)
class Mouse(Message):
    """Pixels that the mouse moved right and down; the next chunk turns there."""

    type: ClassVar[str] = "mouse"
    dx: int = 0
    dy: int = 0


@dataclass(frozen=True)
class Prompt(Message):
    """Change the prompt from the next chunk on, or from chunk `chunk`."""

    type: ClassVar[str] = "prompt"
    text: str = ""
    chunk: int = 0


@dataclass(frozen=True)
class Pause(Message):
    """Stop before the next chunk, or go on."""

    type: ClassVar[str] = "pause"
    paused: bool = True


@dataclass(frozen=True)
class Reset(Message):
    """Begin again; fields that are given replace the session's own."""

    type: ClassVar[str] = "reset"
    plan: str | None = None
    prompt: str | None = None
    seed: int | None = None
    world: int | None = None
    look: bool = False
    strength: float | None = None


@dataclass(frozen=True)
class Replay(Message):
    """Begin again and play an action log."""

    type: ClassVar[str] = "replay"
    log: dict[str, Any] | None = None


@dataclass(frozen=True)
class Rewind(Message):
    """Go back to the newest snapshot at or before this chunk."""

    type: ClassVar[str] = "rewind"
    chunk: int = 0


@dataclass(frozen=True)
class Beside(Message):
    """Run another plan along the same log: in turns with the session's, or when there is time."""

    type: ClassVar[str] = "beside"
    mode: Literal["off", "turns", "follow"] = "off"
    plan: str = "dense"


@dataclass(frozen=True)
class Map(Message):
    """Send with every chunk what was read, merged, replayed and fetched; costs CUDA graphs."""

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
class Check(Message):
    """Judge the newest frame of each wall that was faced straight on: does it show the wall?"""

    type: ClassVar[str] = "check"


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
        Mouse,
        Prompt,
        Pause,
        Reset,
        Replay,
        Rewind,
        Beside,
        Map,
        Record,
        GetLog,
        Check,
        Close,
    )
}
# each is a turn of its own, or a check's: an encoder's
COSTLY = (Reset, Replay, Rewind, Beside, Map, Record, GetLog, Check)
BOUNDS = {
    "id": (0, MAX_INT),
    "seed": (ASKED["seed"].low, 2**53 - 1),  # what JavaScript's numbers hold
    "world": (ASKED["world"].low, ASKED["world"].high),
    "quality": (1, 100),
    "chunk": (0, MAX_INT),
    "strength": (0, 1),
    "dx": (-10_000, 10_000),
    "dy": (-10_000, 10_000),
}
LETTERS = {"plan": 500, "session": 64, "secret": 64, "actions": 256, "image": 500_000}


def parse(text: str, limits: Limits) -> Message:
    """Parse and check a client's message; a malformed one raises TachyscopeError."""
    if len(text) > limits.log_bytes:
        raise TachyscopeError(f"a message has at most {limits.log_bytes} bytes, got {len(text)}")
    value = read_json(text)
    if len(text) > limits.message_bytes and not (value.get("log") or value.get("image")):
        raise TachyscopeError(
            f"a message without a log or an image has at most {limits.message_bytes} bytes, got "
            f"{len(text)}"
        )
    kind = value.pop("type", None)
    if not isinstance(kind, str) or kind not in MESSAGES:
        raise TachyscopeError(
            f"a message has one of the types {', '.join(MESSAGES)}, got {spelled(kind)}"
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
        check_prompt(value.get(name) or "", limits)
    return fields(**value)


def check_prompt(text: str, limits: Limits) -> None:
    """Raise where a prompt is too long."""
    if len(text) > limits.prompt_letters:
        raise TachyscopeError(
            f"a prompt has at most {limits.prompt_letters} letters here, got {len(text)}: shorten "
            f"it"
        )


def read_json(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object; anything else raises TachyscopeError."""
    try:
        text = text if isinstance(text, str) else text.decode()
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError):
        raise TachyscopeError("a message is a JSON object, got something else") from None
    if not isinstance(value, dict):
        raise TachyscopeError(f"a message is a JSON object, got {spelled(value)}")
    if "\\u" in text:  # JSON has no other way to what `check_text` refuses
        for one in _texts(value):
            check_text(one)
    return value


def check_text(text: str) -> None:
    """Raise where a text has a half of a surrogate pair, which UTF-8 cannot write, or a NUL."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise TachyscopeError(
            f"text is Unicode, got half of a surrogate pair in {shown(text)}: remove it"
        ) from None
    if "\0" in text:
        raise TachyscopeError(f"text has no NUL characters, got {shown(text)}: leave them out")


def _texts(value: Any) -> Iterator[str]:
    """Every text in a JSON value, keys too."""
    rest = [value]
    while rest:
        one = rest.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            rest += [*one, *one.values()]
        elif isinstance(one, list):
            rest += one


def write_json(value: Mapping[str, Any]) -> str:
    """Encode a message of the server."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)  # NaN and Infinity are no JSON


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)  # 1e400
    return value


def _check(kind: str, name: str, value: Any, hint: Any) -> None:
    """Raise unless a field's value is of its type and within its bounds."""
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and types.NoneType in allowed:
        return
    (wanted,) = (one for one in allowed if one is not types.NoneType)
    choices = typing.get_args(wanted) if typing.get_origin(wanted) is Literal else ()
    plain = typing.get_origin(wanted) or wanted
    # JSON may write 1.0 as 1
    right = value in choices if choices else type(value) in (plain, {float: int}.get(plain))
    if choices and not isinstance(value, str):
        right = False
    if not right:
        names = {
            int: "a whole number",
            float: "a number",
            str: "text",
            bool: "true or false",
            dict: "an object",
        }
        rule = " or ".join(choices) if choices else names.get(plain, "a number")
        raise TachyscopeError(f"{name!r} of message {kind!r} is {rule}, got {spelled(value)}")
    if name in BOUNDS and not BOUNDS[name][0] <= value <= BOUNDS[name][1]:
        low, high = BOUNDS[name]
        raise TachyscopeError(
            f"{name!r} of message {kind!r} is from {low} to {high:.0f}, got {spelled(value)}"
        )
    if name in LETTERS and len(value) > LETTERS[name]:
        raise TachyscopeError(
            f"{name!r} of message {kind!r} has at most {LETTERS[name]} letters, got {len(value)}"
        )


class Header(NamedTuple):
    """The header of a binary message, before the picture's file."""

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
