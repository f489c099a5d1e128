"""`python -m tachyscope.evaluation`: `tachyscope eval` where only torch is installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tachyscope.cli.evaluate import Evaluate
from tachyscope.cli.plain import run_verb


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; its exit code."""
    return run_verb(Evaluate, "python -m tachyscope.evaluation", argv)


if __name__ == "__main__":
    sys.exit(main())
