"""The one error that a user's fault raises, the one warning, and what others' errors say."""

import json
import re
import warnings
from collections.abc import Collection

LONGEST_WORD, LONGEST = 200, 1000


class TachyscopeError(Exception):
    """What was given, what is allowed, what to do; one line.

    An option in backticks is a parameter in Python, `frames`, and a command line writes --frames.
    """

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


def shortened(message: str) -> str:
    """A message without the middle of what is too long in it: what was given may be megabytes."""
    words = re.sub(r"\S+", lambda word: _cut(word[0], LONGEST_WORD), message)
    return _cut(words, LONGEST)


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    # the end is where an error says what to do
    return f"{text[: most * 2 // 3]}…{text[-(most // 3) :]}"


class TachyscopeWarning(UserWarning):
    """What a user should know although all went on; one line."""


def warn(message: str) -> None:
    """Warn of something in one line; the command line prints it as a note."""
    warnings.warn(message, TachyscopeWarning, stacklevel=3)


def shown(value: object, most: int = 60) -> str:
    """What was given, for an error: text quoted, its middle left out where it is long.

    A number is spelled, an array or a tensor told by its type and shape, all else by its type.
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
    """A value out of a JSON file or message, as JSON writes it, for an error."""
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return shown(value)
    try:
        return shown(json.dumps(value))[1:-1]
    except (RecursionError, TypeError, ValueError):
        return f"a {type(value).__name__}"


def as_typed(message: str, options: Collection[str]) -> str:
    """An error's words with options as they are typed: `frames` becomes --frames."""

    def typed(match: re.Match[str]) -> str:
        return f"--{match[1].replace('_', '-')}" if match[1] in options else match[1]

    return re.sub(r"`([a-z_]+)`", typed, message)


def first_line(fault: BaseException) -> str:
    """What another's error says first, or is called."""
    return (str(fault).strip() or type(fault).__name__).splitlines()[0]


def is_out_of_memory(fault: BaseException) -> bool:
    """torch has an error of its own for CUDA's memory, and only words for the CPU's."""
    if isinstance(fault, MemoryError) or type(fault).__name__ == "OutOfMemoryError":
        return True
    return isinstance(fault, RuntimeError | OSError) and "allocate memory" in str(fault)
