"""`tachyscope-lab bench sessions`."""

from __future__ import annotations

from dataclasses import dataclass

from tachyscope.cli.verb import ResultsVerb, option
from tachyscope.core.limits import check


@dataclass(frozen=True, kw_only=True)
class BenchSessions(ResultsVerb):
    """Serve a model to clients that press keys: key to pixel, turns, memory, sums of metrics."""

    model: str = option(
        "atrium-world", "A name that `tachyscope list models` has.", positional=True
    )
    plan: str = option("live", "A name that `tachyscope list plans` has, or one with changes.")
    clients: int = option(1, "Clients, each with a session of its own.")
    minutes: float = option(2.0, "How long, after at most half a minute to get warm.")
    seed: int = option(0, "Of the first session's video and keys; the others count on from it.")

    format: str = option("jpeg", "Of the pictures that clients ask for: jpeg, webp, png or h264.")

    def run(self, command: str) -> None:
        for name in ("clients", "minutes", "seed"):
            check(name, getattr(self, name))
        self.check_json()
        from tachyscope_lab.bench.sessions import bench_sessions, lines

        results = bench_sessions(
            self.model, self.plan, clients=self.clients, minutes=self.minutes, seed=self.seed,
            kind=self.format, command=command, on_minute=print if self.prints else None,
        )  # fmt: skip
        print(*lines(results), sep="\n")
        self.emit(results)
