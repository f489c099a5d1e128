"""`python -m tachyscope.bench`: the verbs of `tachyscope bench` where only torch is installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tachyscope.cli.bench import BENCH
from tachyscope.cli.plain import run_one_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; its exit code."""
    about = "Time plans against dense, and dense against itself."
    return run_one_of(BENCH, "python -m tachyscope.bench", about, argv)


if __name__ == "__main__":
    sys.exit(main())
