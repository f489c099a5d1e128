"""`tachyscope-lab misuse`."""

from __future__ import annotations

from dataclasses import dataclass

from tachyscope.cli.verb import ResultsVerb, option
from tachyscope.core.limits import check


@dataclass(frozen=True, kw_only=True)
class Misuse(ResultsVerb):
    """Serve a model to eight clients of misuse and one honest session: what the latter sees."""

    model: str = option("toy-chunks", "A name in `tachyscope list models`.", positional=True)
    minutes: float = option(1.0, "How long, after some seconds to get warm.")
    seed: int = option(0, "Of the attacks and the honest session's keys.")

    def run(self, command: str) -> None:
        for name in ("minutes", "seed"):
            check(name, getattr(self, name))
        self.check_json()
        from tachyscope_lab.bench.misuse import lines, misuse

        results = misuse(
            self.model, minutes=self.minutes, seed=self.seed, command=command,
            on_minute=print if self.prints else None,
        )  # fmt: skip
        print(*lines(results), sep="\n")
        self.emit(results)
