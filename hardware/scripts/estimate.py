"""The rows of results/fpga-estimate.json: replay, window, batch, DRS, context, method.

    python hardware/scripts/estimate.py out/estimate.json

VILA-U-7B with random replay flags, and atrium-tokens with those of a recorded run. Where token
replay is held against neuron replay, VILA-U has a window of 16, so that eight rows fit the board.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tachyscope_fpga.model.board import U280
from tachyscope_fpga.model.estimate import Settings, assumptions, estimate
from tachyscope_fpga.model.workload import WORKLOADS, Trace
from tachyscope_fpga.results import document, emit

MODEL = WORKLOADS["vila-u-7b"]
TRACE = Path(__file__).parents[1] / "traces" / "atrium-tokens.npz"
WAYS = (("tokens", False), ("tokens", True), ("neurons", True))  # method, DRS
GRID: list[tuple[Settings, int | None]] = [
    (Settings(replay, window, drs=drs), context)
    for context in (256, 2048, None)
    for replay in ((0.2, 0.5, 0.8) if context else (0.8,))
    for window in (0, 16)
    for drs in (False, True)
]
GRID += [
    (Settings(replay, 16, batch, drs, method=method), 1024)
    for replay in (0.5, 0.75, 0.9)
    for batch in (1, 2, 4, 8)
    for method, drs in WAYS
]


def of_trace(trace: Trace) -> list[dict[str, Any]]:
    """The recorded model with one row up to all of them, each method at the same share."""
    model, rows = trace.workload, []
    context = model.prompt + model.steps // 2
    for batch in range(1, trace.replayed.shape[2] + 1):
        flags = trace.replayed[:, :, :batch]
        for method, drs in WAYS:
            settings = Settings(float(flags.mean()), 0, batch, drs, method=method)
            given = flags if method == "tokens" else None
            rows.append(estimate(model, U280, settings, context, given))
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", help="a JSON file, or - for stdout")
    args = parser.parse_args()
    rows = [estimate(MODEL, U280, settings, context) for settings, context in GRID]
    rows += of_trace(Trace.load(TRACE))
    listed = [asdict(one) for one in assumptions(U280, MODEL)]
    command = shlex.join(["python", *sys.argv])
    emit(document("fpga-estimate", rows, command, assumptions=listed), args.out)
