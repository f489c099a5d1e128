"""The command `tachyscope-lab`: its verbs, by the parser of `tachyscope`."""

from __future__ import annotations

from collections.abc import Sequence

from tachyscope.cli.app import make_app, run_app
from tachyscope.cli.verb import Verb
from tachyscope_lab import __version__
from tachyscope_lab.cli.bench_memory import BenchMemory
from tachyscope_lab.cli.bench_ranks import BenchRanks
from tachyscope_lab.cli.bench_rivals import BenchRivals
from tachyscope_lab.cli.bench_sessions import BenchSessions
from tachyscope_lab.cli.bench_tokens import BenchTokens
from tachyscope_lab.cli.bench_wan import BenchWan
from tachyscope_lab.cli.calibrate import Calibrate
from tachyscope_lab.cli.evaluate import Evaluate
from tachyscope_lab.cli.metrics_weights import MetricsWeights
from tachyscope_lab.cli.misuse import Misuse
from tachyscope_lab.cli.plug import Plug
from tachyscope_lab.cli.record import Record
from tachyscope_lab.cli.tables import Tables

VERBS: dict[str, type[Verb]] = {
    "eval": Evaluate,
    "calibrate": Calibrate,
    "tables": Tables,
    "record": Record,
    "plug": Plug,
    "misuse": Misuse,
    "metrics-weights": MetricsWeights,
}
BENCH: dict[str, type[Verb]] = {
    "wan": BenchWan,
    "tokens": BenchTokens,
    "rivals": BenchRivals,
    "sessions": BenchSessions,
    "memory": BenchMemory,
    "ranks": BenchRanks,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; its exit code, as `run_command` tells it."""
    return run_app(app, "tachyscope-lab", argv)


app = make_app(
    "tachyscope-lab",
    "How Tachyscope's numbers are made: evaluation, rivals, full-size benchmarks, tables.",
    __version__,
    VERBS | {f"bench {name}": verb for name, verb in BENCH.items()},
)
