"""How a command's process ends: a fault is one line, a signal or a closed pipe an exit code."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from itertools import islice
from types import FrameType
from typing import Any, TypeVar

from tachyscope.errors import TachyscopeError, first_line, is_out_of_memory, shortened

T = TypeVar("T")
R = TypeVar("R")

FAULT, UNEXPECTED, CLOSED_PIPE = 2, 1, 128 + 13
NO_MEMORY = (
    "the memory is not enough: give the plan's cache a budget, for example --cache "
    "merge:budget=21f, or take a smaller --size; tachyscope bench fit tells what fits"
)


class Stopped(BaseException):
    """SIGTERM or SIGHUP came: raised in the main thread, so that unfinished files go."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def guard_start() -> None:
    """Until `run_command` begins, Ctrl-C ends the process at once: packages are being imported."""

    def leave(number: int, frame: FrameType | None) -> None:
        os.write(2, b"tachyscope: interrupted\n")
        os._exit(128 + number)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)


def run_command(command: Callable[[], object], show_traceback: bool = False) -> int:
    """Run a command; its exit code, after at most one line on stderr.

    0, 2 after a fault of what was given, 1 after one of ours, 128 + N after signal N, 141 where
    stdout was closed.
    """
    with _signals() as came, _any_letter():
        try:
            command()
            _flush()
            return 0
        except SystemExit:  # argparse has told its help
            raise
        except BaseException as error:
            if show_traceback:
                traceback.print_exc()
            # an import that is interrupted may raise something else
            return _end(Stopped(came[0]) if came else error)


@contextmanager
def _any_letter() -> Iterator[None]:
    """What stdout's encoding has no letter for, a path's stray byte for one, is written escaped."""
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
    """Tell how a command ended; its exit code."""
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
        what = error.filename or "standard output"  # files of ours name themselves
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
    """Signals that end a process raise meanwhile; the value lists those that came."""
    came: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        came.append(number)
        raise KeyboardInterrupt if number == signal.SIGINT else Stopped(number)

    before: dict[int, Any] = {}
    # only the main thread may set handlers; a signal that is ignored stays so, as nohup wants it
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


def spread(
    function: Callable[[T], R],
    tasks: Iterable[T],
    jobs: int,
    prepare: Callable[..., None],
    *args: Any,
    in_order: bool = True,
) -> Iterator[R]:
    """A function's results for some tasks by so many new processes, each prepared once.

    They come in the order of the tasks, or as each is done. One job is done by this process. When
    this one is stopped the others end too, and say nothing.
    """
    if jobs == 1:
        yield from map(function, tasks)
        return
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), prepare, args)
    try:
        with _ending_children():
            with _inherited_interrupt():
                futures = [pool.submit(function, task) for task in tasks]
            for future in futures if in_order else as_completed(futures):
                yield future.result()
    except BrokenProcessPool as error:
        raise _ended_outside(jobs) from error
    finally:
        pool.shutdown(cancel_futures=True)


def spread_safely(
    function: Callable[[T], R],
    tasks: Iterable[T],
    jobs: int,
    prepare: Callable[..., None],
    *args: Any,
) -> Iterator[tuple[T, R | Exception]]:
    """Tasks and their results as they end; a task that fails has its fault as result.

    As `spread`, but a task is taken when a process is free for it, and a process that ended, or
    whose GPU refuses all that follows a fault, is replaced by a new one.
    """
    if jobs == 1:
        for task in tasks:
            try:
                yield task, function(task)
            except Exception as error:
                yield task, error
        return
    left, fresh = iter(tasks), multiprocessing.get_context("spawn")
    # a pool a process, so that one that breaks costs no other its task
    idle: list[ProcessPoolExecutor | None] = [None] * jobs
    busy: dict[Future[R], tuple[T, ProcessPoolExecutor]] = {}
    pools: list[ProcessPoolExecutor] = []
    try:
        with _ending_children():
            while True:
                while idle and (begun := list(islice(left, 1))):
                    pool = idle.pop()
                    if pool is None:
                        pool = ProcessPoolExecutor(1, fresh, prepare, args)
                        pools.append(pool)
                    with _inherited_interrupt():
                        busy[pool.submit(function, begun[0])] = begun[0], pool
                if not busy:
                    return
                for done in wait(busy, return_when=FIRST_COMPLETED).done:
                    task, pool = busy.pop(done)
                    fault = done.exception()
                    ended = isinstance(fault, BrokenProcessPool)
                    if ended or (fault is not None and "CUDA error" in str(fault)):
                        pool.shutdown(wait=False)
                        idle.append(None)
                    else:
                        idle.append(pool)
                    if isinstance(fault, Exception):
                        yield task, _ended_outside(jobs) if ended else fault
                    else:
                        yield task, done.result()
    finally:
        for pool in pools:
            pool.shutdown(cancel_futures=True)


def _ended_outside(jobs: int) -> TachyscopeError:
    return TachyscopeError(
        f"one of {jobs} worker processes was ended from outside, for want of memory perhaps: free "
        f"some, or ask for less"
    )


@contextmanager
def _ending_children() -> Iterator[None]:
    """Processes begun meanwhile end with a fault of this one."""
    before = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        raise


@contextmanager
def _inherited_interrupt() -> Iterator[None]:
    """Processes begun meanwhile ignore Ctrl-C, which reaches all of a terminal's: we end them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _tell(message: str) -> None:
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(message.split()))
    with suppress(OSError):
        print(f"tachyscope: {line}", file=sys.stderr, flush=True)


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _flush_or_discard() -> None:
    """Write what waits for stdout; where that cannot be, give it up."""
    try:
        _flush()
    except OSError:
        # else Python would try again at its end, and tell of it
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
