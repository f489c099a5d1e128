"""Time, bandwidth and energy of a device."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence

import torch

from tachyscope.kernels.launch import record

Work = Callable[[], object]
COPY_BYTES = 4 << 30


def recorded(work: Work, device: torch.device) -> Work:
    """The work as a CUDA graph, after one run that compiles it; elsewhere as it is."""
    work()
    if device.type != "cuda":
        return work
    torch.cuda.synchronize(device)
    return record(work).replay


def milliseconds(work: Work, times: int, device: torch.device) -> float:
    """What one of so many runs in a row takes."""
    if device.type != "cuda":
        begun = time.perf_counter()
        for _ in range(times):
            work()
        return 1e3 * (time.perf_counter() - begun) / times
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        work()
    stop.record()
    stop.synchronize()
    spent: float = start.elapsed_time(stop)
    return spent / times


def memory_rates(device: torch.device) -> dict[str, float]:
    """TB/s of a plain copy, read and written, the best of two ways; and of reading alone."""
    size = COPY_BYTES if device.type == "cuda" else 1 << 27  # more than caches hold
    a = torch.zeros(size // 4, dtype=torch.float32, device=device)
    b = torch.zeros_like(a)

    def rate(work: Work, count: int) -> float:
        run = recorded(work, device)
        return count / min(milliseconds(run, 3, device) for _ in range(5)) / 1e9

    copies = rate(lambda: b.copy_(a), 2 * size), rate(lambda: torch.neg(a, out=b), 2 * size)
    return {"copy_tb_s": max(copies), "read_tb_s": rate(lambda: a.sum(), size)}


class EnergyCounter:
    """The GPU's own counter of joules, by its driver's library; None where there is none."""

    def __init__(self, device: torch.device) -> None:
        self._library: ctypes.CDLL | None = None
        if device.type != "cuda":
            return
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
            self._handle = ctypes.c_void_p()
            name = torch.cuda.get_device_properties(device).uuid
            code = library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(
                f"GPU-{name}".encode(), ctypes.byref(self._handle)
            )
        except (OSError, AttributeError):
            return
        if code == 0:
            self._library = library
            if self.joules() is None:
                self._library = None

    def joules(self) -> float | None:
        """Since the driver was loaded."""
        if self._library is None:
            return None
        spent = ctypes.c_ulonglong()
        failed = self._library.nvmlDeviceGetTotalEnergyConsumption(
            self._handle, ctypes.byref(spent)
        )
        return None if failed else spent.value / 1e3

    def watts(self, work: Work, seconds: float, device: torch.device) -> float | None:
        """The mean while work is done over and over for so long.

        The counter moves ten times a second or so: it is watched, and what is told is the slope
        from its first move to its last.
        """
        if self._library is None:
            return None
        moves: list[tuple[float, float]] = []
        done = threading.Event()

        def watch() -> None:
            last = self.joules()
            while not done.wait(0.001):
                now = self.joules()
                if now is not None and now != last:
                    moves.append((time.perf_counter(), now))
                    last = now

        watcher = threading.Thread(target=watch)
        begun = time.perf_counter()
        watcher.start()
        while time.perf_counter() - begun < seconds:
            work()
            torch.cuda.synchronize(device)
        done.set()
        watcher.join()
        return slope(moves)


def slope(moves: Sequence[tuple[float, float]]) -> float | None:
    """From the first of some points (time, joules) to the last, which lie apart; None: too few."""
    if len(moves) < 2:
        return None
    (begun, before), (ended, after) = moves[0], moves[-1]
    return (after - before) / (ended - begun)
