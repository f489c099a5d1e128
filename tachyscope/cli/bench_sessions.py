"""`tachyscope bench sessions`, and `python -m tachyscope.bench sessions`."""

from __future__ import annotations

from dataclasses import dataclass

from tachyscope.bounds import check
from tachyscope.cli.serve import check_installed
from tachyscope.cli.verb import Verb, option


@dataclass(frozen=True, kw_only=True)
class BenchSessions(Verb):
    """Serve a model to clients that press keys: key to pixel, turns, memory, sums of metrics."""

    model: str = option("atrium-world", "A name that `tachyscope models` lists.", positional=True)
    plan: str = option("live", "A name that `tachyscope methods` lists, or one with changes.")
    clients: int = option(1, "Clients, each with a session of its own.")
    minutes: float = option(2.0, "How long, after at most half a minute to get warm.")
    seed: int = option(0, "Of the first session's video and keys; the others count on from it.")

    def run(self, command: str) -> None:
        check_installed("bench sessions")
        for name in ("clients", "minutes", "seed"):
            check(name, getattr(self, name))
        self.check_json()
        from tachyscope.serve.load_test import bench_sessions, lines

        results = bench_sessions(
            self.model, self.plan, clients=self.clients, minutes=self.minutes, seed=self.seed,
            command=command, on_minute=print if self.prints else None,
        )  # fmt: skip
        print(*lines(results), sep="\n")
        self.emit(results)
