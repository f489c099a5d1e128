"""The error and the warning that users see, and helpers for their messages."""

import json
import re
import warnings
from collections.abc import Collection

LONGEST_WORD, LONGEST = 200, 1000


class TachyscopeError(Exception):
    """One line that says what was given, what is allowed, and what to do.

    An option in backticks is a Python parameter: `frames`; the command line shows it as --frames.
    """

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


def shortened(message: str) -> str:
    """The message, with the middle of long words cut out: what was given may be megabytes."""
    words = re.sub(r"\S+", lambda word: _cut(word[0], LONGEST_WORD), message)
    return _cut(words, LONGEST)


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    # keep the end: it says what to do
    return f"{text[: most * 2 // 3]}…{text[-(most // 3) :]}"


class TachyscopeWarning(UserWarning):
    """One line that a user should know, though nothing failed."""


def warn(message: str) -> None:
    """Warn in one line, which the command line prints as a note."""
    warnings.warn(message, TachyscopeWarning, stacklevel=3)


def shown(value: object, most: int = 60) -> str:
    """A value as errors show it: text quoted and shortened, numbers as they are.

    Arrays and tensors are shown by type, dtype and shape, everything else by its type.
    """
    if isinstance(value, str):
        return repr(f"{value[: most - 20]}…{value[-19:]}" if len(value) > most else value)
    if isinstance(value, int) and abs(value) > 10**30:
        # Python refuses to write a number of more than some thousand digits
        return "a number of more than 30 digits"
    if value is None or isinstance(value, int | float):
        return repr(value)
    if hasattr(value, "dtype") and hasattr(value, "shape") and hasattr(value, "ndim"):
        return f"{type(value).__name__} of {value.dtype} {list(value.shape)}"
    return f"a {type(value).__name__}"


def spelled(value: object) -> str:
    """A value from a JSON file or message as errors show it: as JSON."""
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return shown(value)
    try:
        return shown(json.dumps(value))[1:-1]
    except (RecursionError, TypeError, ValueError):
        return f"a {type(value).__name__}"


def as_typed(message: str, options: Collection[str]) -> str:
    """A message with options as the command line spells them: `frames` becomes --frames."""

    def typed(match: re.Match[str]) -> str:
        return f"--{match[1].replace('_', '-')}" if match[1] in options else match[1]

    return re.sub(r"`([a-z_]+)`", typed, message)


def first_line(fault: BaseException) -> str:
    """The first line of an exception's message, or its type if it has none."""
    return (str(fault).strip() or type(fault).__name__).splitlines()[0]


def is_out_of_memory(fault: BaseException) -> bool:
    """Whether memory ran out; for the CPU's, torch raises a RuntimeError with these words."""
    if isinstance(fault, MemoryError) or type(fault).__name__ == "OutOfMemoryError":
        return True
    return isinstance(fault, RuntimeError | OSError) and "allocate memory" in str(fault)
