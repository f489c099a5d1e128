"""The one error that a user's fault raises, the one warning, and what others' errors say."""

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


def shown(text: str, most: int = 60) -> str:
    """What was given, quoted for an error; its middle left out where it is long."""
    if len(text) > most:
        text = f"{text[: most - 20]}…{text[-19:]}"
    return repr(text)


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
