"""Work spread over processes, which end with the one that began them."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

from tachyscope.core.errors import TachyscopeError

T = TypeVar("T")
R = TypeVar("R")


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
