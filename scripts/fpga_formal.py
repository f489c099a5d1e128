"""Every bounded check of the accelerator, with its depth, outcome and time; stops at the first
whose outcome is not the expected one.

    python scripts/fpga_formal.py out/fpga/formal --json FILE
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tachyscope.fpga.formal import CHECKS, check
from tachyscope.results import document, emit


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder for SymbiYosys's files")
    parser.add_argument("--json", help="write the rows to this file")
    args = parser.parse_args()
    rows = []
    for name in CHECKS:
        rows.append(check(name, args.out))
        print(" ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if args.json:
        emit(document("fpga-formal", rows, "python scripts/fpga_formal.py out"), args.json)


if __name__ == "__main__":
    main()
