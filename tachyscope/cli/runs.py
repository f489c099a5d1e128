"""Runs side by side in a terminal, as `generate` and `compare` print them."""

from __future__ import annotations

from collections.abc import Sequence

from tachyscope.report import MEASURES, Run
from tachyscope.tables import format_table


def print_runs(runs: Sequence[Run]) -> None:
    """The runs' sums side by side, then what a reader must know of them."""
    rows = []
    for measure in MEASURES:
        cells = []
        for run in runs:
            value, simulated = (run.summary.get(f"{x}{measure.key}") for x in ("", "simulated_"))
            if simulated and not value:
                cells.append(f"{measure.write(simulated)} simulated")
            elif measure.key == "ratio_dense" and value and not run.summary["real"]:
                cells.append(f"{measure.write(value)} within noise")
            else:
                cells.append("" if value is None else measure.write(value))
        if any(cells):
            rows.append([measure.name, *cells])
    print(*format_table(["", *(run.name for run in runs)], rows), sep="\n")
    for run in runs:
        print(f"{run.name}: {run.plan}")
        for note in run.notes:
            print(f"{run.name}: {note}")
