"""The one error that a user's fault raises, the one warning, and what others' errors say."""

import warnings


class TachyscopeError(Exception):
    """What was given, what is allowed, what to do; one line."""


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


def first_line(fault: BaseException) -> str:
    """What another's error says first, or is called."""
    return (str(fault).strip() or type(fault).__name__).splitlines()[0]


def is_out_of_memory(fault: BaseException) -> bool:
    """torch has an error of its own for CUDA's memory, and only words for the CPU's."""
    return type(fault).__name__ == "OutOfMemoryError" or "allocate memory" in str(fault)
