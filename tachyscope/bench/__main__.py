"""`python -m tachyscope.bench`: the verbs of `tachyscope bench` where only torch is installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tachyscope.cli.bench_cpu import BenchCpu
from tachyscope.cli.bench_fit import BenchFit
from tachyscope.cli.bench_rivals import BenchRivals
from tachyscope.cli.bench_sessions import BenchSessions
from tachyscope.cli.bench_tokens import BenchTokens
from tachyscope.cli.bench_wan import BenchWan
from tachyscope.cli.plain import run_one_of

VERBS = {
    "cpu": BenchCpu,
    "wan": BenchWan,
    "tokens": BenchTokens,
    "rivals": BenchRivals,
    "sessions": BenchSessions,
    "fit": BenchFit,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; its exit code."""
    about = "Time plans against dense, and dense against itself."
    return run_one_of(VERBS, "python -m tachyscope.bench", about, argv)


if __name__ == "__main__":
    sys.exit(main())
