"""The verbs of `tachyscope bench`, by name."""

from __future__ import annotations

from tachyscope.cli.bench_cpu import BenchCpu
from tachyscope.cli.bench_fit import BenchFit
from tachyscope.cli.bench_rivals import BenchRivals
from tachyscope.cli.bench_sessions import BenchSessions
from tachyscope.cli.bench_tokens import BenchTokens
from tachyscope.cli.bench_wan import BenchWan
from tachyscope.cli.verb import Verb

BENCH: dict[str, type[Verb]] = {
    "cpu": BenchCpu,
    "wan": BenchWan,
    "tokens": BenchTokens,
    "rivals": BenchRivals,
    "sessions": BenchSessions,
    "fit": BenchFit,
}
