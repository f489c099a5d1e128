"""The rows of bench/results/fpga-estimate-*.json: replay, window, batch, DRS, context, method."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict

from tachyscope.fpga.board import U280
from tachyscope.fpga.estimate import Settings, assumptions, estimate
from tachyscope.fpga.workload import WORKLOADS
from tachyscope.results import document, emit

MODEL = WORKLOADS["vila-u-7b"]
GRID: list[tuple[Settings, int | None]] = [
    (Settings(replay, window, drs=drs), context)
    for context in (256, 2048, None)
    for replay in ((0.2, 0.5, 0.8) if context else (0.8,))
    for window in (0, 16)
    for drs in (False, True)
]
GRID += [
    (Settings(0.75, 16, batch, drs, method=method), 1024)
    for batch in (1, 2, 4, 8)
    for method, drs in (("tokens", False), ("tokens", True), ("neurons", True))
]

if __name__ == "__main__":
    rows = [estimate(MODEL, U280, settings, context) for settings, context in GRID]
    listed = [asdict(one) for one in assumptions(U280, MODEL)]
    command = shlex.join(["python", *sys.argv])
    emit(document("fpga-estimate", rows, command, assumptions=listed), sys.argv[1])
