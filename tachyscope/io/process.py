"""Runs a command: errors become one line, signals and closed pipes exit codes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from tachyscope.core.errors import TachyscopeError, first_line, is_out_of_memory, shortened

FAULT, UNEXPECTED, CLOSED_PIPE = 2, 1, 128 + 13
NO_MEMORY = (
    "the memory is not enough: give the plan's cache a budget, for example "
    "cache=merge:budget=21f, or take a smaller --size; tachyscope fit shows what fits"
)


class Stopped(BaseException):
    """SIGTERM or SIGHUP, raised in the main thread so that temporary files are removed."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def share_cores() -> None:
    """Have OpenMP's threads sleep while they wait, not spin; called before torch is imported.

    On a busy machine a spinning thread keeps the one it waits for from the core. On two cores, with
    other processes beside it, `atrium-world` made 0.1 to 0.3 frames/s, and 0.6 to 1.4 with 2,000
    spins; alone 6.5 to 7.0 either way. GNU's OpenMP reads the variable once.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def guard_start() -> None:
    """Have Ctrl-C end the process at once while packages are imported, before `run_command`."""

    def leave(number: int, frame: FrameType | None) -> None:
        os.write(2, b"tachyscope: interrupted\n")
        os._exit(128 + number)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)


def run_command(command: Callable[[], object], show_traceback: bool = False) -> int:
    """Run a command and return its exit code, after at most one line on stderr.

    0 for success, 2 for wrong input, 1 for a bug of ours, 128 + N for signal N, 141 if stdout was
    closed.
    """
    with _signals() as came, _any_letter():
        try:
            command()
            _flush()
            return 0
        except SystemExit:  # argparse has printed its help
            raise
        except BaseException as error:
            if show_traceback:
                traceback.print_exc()
            # an interrupted import may raise something else
            return _end(Stopped(came[0]) if came else error)


@contextmanager
def _any_letter() -> Iterator[None]:
    """Have stdout escape characters that its encoding lacks, such as a path's invalid byte."""
    stream: Any = sys.stdout
    before = getattr(stream, "errors", None)
    if before is None or not hasattr(stream, "reconfigure"):
        yield
        return
    stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            stream.reconfigure(errors=before)


def _end(error: BaseException) -> int:
    """Print how a command failed, and return its exit code."""
    _flush_or_discard()
    if isinstance(error, KeyboardInterrupt):
        error = Stopped(signal.SIGINT)
    if isinstance(error, Stopped):
        name = signal.Signals(error.number).name
        _tell("interrupted" if name == "SIGINT" else f"stopped by {name}")
        return 128 + error.number
    if isinstance(error, BrokenPipeError):
        return CLOSED_PIPE
    if isinstance(error, TachyscopeError):
        _tell(str(error))
        return FAULT
    if is_out_of_memory(error):
        _tell(NO_MEMORY)
        return FAULT
    if isinstance(error, OSError):
        what = error.filename or "standard output"  # our own files raise a TachyscopeError
        reason = (error.strerror or str(error)).lower()
        _tell(shortened(f"{what} cannot be used ({reason}): choose another place"))
        return FAULT
    _tell(
        f"{type(error).__name__}: {first_line(error)}: this is a fault of tachyscope's own: run "
        f"the command again with --traceback and report what it shows"
    )
    return UNEXPECTED


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Have signals that end a process raise an exception; the value lists those received."""
    came: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        came.append(number)
        raise KeyboardInterrupt if number == signal.SIGINT else Stopped(number)

    before: dict[int, Any] = {}
    # only the main thread may set handlers; ignored signals stay ignored, for nohup
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, stop)
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tell(message: str) -> None:
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(message.split()))
    with suppress(OSError):
        print(f"tachyscope: {line}", file=sys.stderr, flush=True)


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _flush_or_discard() -> None:
    """Flush stdout; if that fails, discard what it has buffered."""
    try:
        _flush()
    except OSError:
        # else Python flushes again at exit, and prints the error
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
