"""Boards, and cores on them: every number is an assumption but the maker's, with low and high."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tachyscope_fpga.model import hbm


@dataclass(frozen=True)
class Assumption:
    """A number that was not measured."""

    name: str
    value: float
    low: float
    high: float
    unit: str
    why: str


@dataclass(frozen=True)
class Board:
    """A board, and cores on it; all its numbers are assumptions but the maker's."""

    name: str
    memory: int
    ports: int
    timing: hbm.Timing
    clock_mhz: float
    cores: int
    lanes: int
    macs: int
    slots: int
    latency_ns: float
    pj_per_byte: float
    pj_per_mac: float
    static_w: float
    vector_cycles: int
    """From the last use of a segment's weights to the first of the next: pipelines, norms, RoPE."""

    @property
    def peak(self) -> float:
        """Bytes a second."""
        return self.timing.peak * self.timing.clock_mhz * 1e6 * self.ports

    def service(self, block: int) -> int:
        """Cycles of one block of bytes, refreshes left out."""
        clocks = hbm.read_clocks(block // self.ports * 8, self.timing) / 8
        return math.ceil(clocks * self.clock_mhz / self.timing.clock_mhz)

    @property
    def macs_per_cycle(self) -> int:
        return self.cores * self.lanes * self.macs


U280 = Board(
    name="u280",
    memory=8 * 2**30,
    ports=32,
    timing=hbm.Timing(),
    clock_mhz=250,
    cores=8,
    lanes=32,
    macs=32,
    slots=16,
    latency_ns=250,
    pj_per_byte=40,
    pj_per_mac=1.0,
    static_w=30,
    vector_cycles=200,
)
BOARDS = {"u280": U280}


def cases(board: Board) -> dict[str, Board]:
    """The board as assumed, at the low and at the high end of every assumption."""
    return {
        "usual": board,
        "low": replace(
            board, clock_mhz=200, timing=hbm.LOW, latency_ns=400, pj_per_byte=56, pj_per_mac=2.0,
            static_w=40, vector_cycles=400,
        ),
        "high": replace(
            board, clock_mhz=300, timing=hbm.HIGH, latency_ns=150, pj_per_byte=31, pj_per_mac=0.5,
            static_w=20, vector_cycles=100,
        ),
    }  # fmt: skip
