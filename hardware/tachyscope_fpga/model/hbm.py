"""One pseudo-channel of HBM2 at command level: how much of its peak a long read gets.

Activates, reads and refreshes are placed one by one, each as early as the timings allow. The
timings are those of the memory's class, not of a measured board: all are assumptions, with a low
and a high set beside the usual one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tachyscope_fpga.parts.fixed import check_range


@dataclass(frozen=True)
class Timing:
    """Clocks of one pseudo-channel (900 MHz, 64 bits at double rate: 14.4 GB/s)."""

    clock_mhz: float = 900.0
    page: int = 1024
    """Bytes of one row of one bank."""
    burst: int = 32
    """Bytes of one read."""
    groups: int = 4
    banks: int = 4
    """Bank groups, and banks of each."""
    between: int = 2
    """From one read to the next of another bank group, which is the bus's own rate (tCCD_S)."""
    between_same: int = 4
    """The same within a bank group (tCCD_L)."""
    to_read: int = 13
    """From an activate to the first read of its row (tRCD)."""
    to_close: int = 7
    """From the last read to the precharge (tRTP)."""
    closed: int = 13
    """The precharge (tRP)."""
    between_activates: int = 4
    """tRRD."""
    four_activates: int = 15
    """Four activates take at least so long (tFAW)."""
    refresh_every: int = 3510
    refresh_for: int = 234
    """tREFI (3.9 us), tRFC (260 ns)."""
    ahead: int = 4
    """Rows that the controller opens before they are read; reads alternate between two."""

    def __post_init__(self) -> None:
        check_range("Timing ahead", self.ahead, 2, 64)

    @property
    def peak(self) -> float:
        """Bytes a clock."""
        return self.burst / self.between


LOW = Timing(refresh_for=315, to_read=16, closed=16, ahead=2)
HIGH = Timing(refresh_for=90)
"""Refresh of single banks while others are read hides most of it."""


def read_clocks(total: int, timing: Timing) -> int:
    """Clocks to read `total` bytes that lie one after the other, refreshes left out.

    Consecutive reads alternate between two bank groups, as a controller maps addresses.
    """
    check_range("total", total, timing.burst, 2**24)
    per_page = timing.page // timing.burst
    pages = -(-total // timing.page)
    opened: list[int] = []  # when each page was activated
    closed_at = [-(10**9)] * (timing.groups * timing.banks)  # when a bank can be activated
    last_four: deque[int] = deque([-(10**9)] * 4, maxlen=4)
    ends: list[int] = []  # the last read of each page
    clock = last = 0

    def bank(page: int) -> int:
        return page % timing.groups * timing.banks + page // timing.groups % timing.banks

    def activate(page: int) -> None:
        start = max(
            closed_at[bank(page)],
            last_four[-1] + timing.between_activates,
            last_four[0] + timing.four_activates,
            ends[page - timing.ahead] if page >= timing.ahead else 0,
        )
        last_four.append(start)
        opened.append(start)

    group = -1
    for first in range(0, pages, 2):
        pair = [page for page in (first, first + 1) if page < pages]
        for page in pair:
            activate(page)
        for _ in range(per_page):
            for page in pair:
                gap = timing.between_same if page % timing.groups == group else timing.between
                clock = max(clock + gap, opened[page] + timing.to_read)
                group, last = page % timing.groups, clock
        for page in pair:
            ends.append(last)
            closed_at[bank(page)] = last + timing.to_close + timing.closed
    return last + timing.between


def efficiency(timing: Timing, total: int = 2**20) -> float:
    """Share of the peak that a long read gets, refreshes included."""
    ideal = total / timing.peak
    awake = 1 - timing.refresh_for / timing.refresh_every
    return ideal / read_clocks(total, timing) * awake
