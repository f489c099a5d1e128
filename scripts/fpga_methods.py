"""Token replay with DRS beside neuron replay on a U280, over shares and rows: which is faster.

    python scripts/fpga_methods.py --trace bench/traces/atrium-tokens.npz --json FILE

Of VILA-U-7B with a window of 16 tokens, so that eight rows fit the board, at a context of 1,024;
its replay flags are random, each layer, row and token for itself. Of a trace's model at the trace's
own share, with the flags as they were recorded. Estimates: nothing was measured on a board.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tachyscope.fpga.board import U280
from tachyscope.fpga.estimate import METHODS, Settings, estimate
from tachyscope.fpga.workload import WORKLOADS, Trace
from tachyscope.results import document, emit

KEYS = ("model", "trace", "method", "replay", "batch", "tokens_per_s", "speedup_dense", "bytes")


def rows_of(trace: Path) -> list[dict[str, Any]]:
    model, rows = WORKLOADS["vila-u-7b"], []
    for replay in (0.5, 0.75, 0.9):
        for batch in (1, 2, 4, 8):
            for method in METHODS:
                settings = Settings(replay, window=16, batch=batch, method=method)
                rows.append(estimate(model, U280, settings, 1024))
    recorded = Trace.load(trace)
    small, flags = recorded.workload, recorded.replayed
    context = small.prompt + small.steps // 2
    for batch in range(1, flags.shape[2] + 1):
        part = flags[:, :, :batch]
        for method in METHODS:
            settings = Settings(float(part.mean()), batch=batch, method=method)
            kept = part if method == "tokens" else None
            rows.append(estimate(small, U280, settings, context, kept))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, default=Path("bench/traces/atrium-tokens.npz"))
    parser.add_argument("--json", help="write the rows to this file")
    args = parser.parse_args()
    rows = rows_of(args.trace)
    print(f"{'model':14} {'replay':>7} {'rows':>4} {'tokens, x':>10} {'neurons, x':>10}")
    for tokens, neurons in zip(rows[::2], rows[1::2], strict=True):
        print(
            f"{tokens['model']:14} {tokens['replay']:7.3f} {tokens['batch']:4} "
            f"{tokens['speedup_dense']:10.3f} {neurons['speedup_dense']:10.3f}"
        )
    if args.json:
        kept = [{key: row[key] for key in KEYS} for row in rows]
        command = f"python scripts/fpga_methods.py --trace {args.trace}"
        emit(document("fpga-methods", kept, command), args.json)


if __name__ == "__main__":
    main()
