"""Put what budgets of `replay=input` lose into a calibration, so that `loss=` can be asked for.

    P=""; for b in 0.0001 0.0003 0.001 0.002 0.004; do P="$P --plan replay=input:budget=$b"; done
    python scripts/eval_gates.py --out out/budgets --device cuda --worlds 16 --seed 900 $P
    python scripts/fit_losses.py out/budgets/gates.json calibration.safetensors

A budget's loss is the mean over cameras and rooms, never less than that of a smaller budget.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from tachyscope.calibration import Calibration
from tachyscope.evaluation.intervals import versus
from tachyscope.models.checkpoint import read_tensors, write_tensors
from tachyscope.results import Document

BUDGET = "replay=input:budget="


def losses(rows: Sequence[Document]) -> list[tuple[float, float]]:
    """Budgets that were measured and the dB that each lost, in order."""
    dense = {row["clip"]: row for row in rows if row["method"] == "dense"}
    by_budget: dict[float, list[float]] = {}
    for row in rows:
        if row["method"].startswith(BUDGET):
            lost = versus(dense[row["clip"]], row, "psnr_truth")[0]
            by_budget.setdefault(float(row["method"].removeprefix(BUDGET)), []).append(lost)
    out, most = [], 0.0
    for budget, lost in sorted(by_budget.items()):
        most = max(most, statistics.fmean(lost))
        out.append((budget, most))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="of eval_gates.py")
    parser.add_argument("calibration", type=Path, help="to be written anew")
    args = parser.parse_args()
    fitted = losses(json.loads(args.results.read_text())["rows"])
    tensors = read_tensors(args.calibration) | {"losses": torch.tensor(fitted)}
    write_tensors(args.calibration, Calibration.of(tensors, str(args.calibration)).tensors())
    for budget, lost in fitted:
        print(f"{budget:g}: {lost:.2f} dB")


if __name__ == "__main__":
    main()
