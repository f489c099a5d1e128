"""`tachyscope bench cpu`, and `python -m tachyscope.bench cpu`."""

from __future__ import annotations

from dataclasses import dataclass

from tachyscope.cli.verb import Verb, option


@dataclass(frozen=True, kw_only=True)
class BenchCpu(Verb):
    """Time plans on this CPU by turns; a ratio is real only outside dense's own noise."""

    model: str = option("toy-chunks", "A model that brings its own weights.")
    plans: str = option("fast;balanced", "Plans, set apart by ';'.")
    frames: int = option(48, "Pixel frames of every run.")
    rounds: int = option(5, "How often each plan is run.")
    at: str | None = option(
        None,
        "Latent frames, set apart by commas: time single chunks after so many, their caches "
        "filled with random entries, instead of whole runs.",
    )

    def run(self, command: str) -> None:
        from tachyscope.bench.cpu import bench, bench_lengths, lines, split_lengths, split_plans
        from tachyscope.models.registry import load
        from tachyscope.progress import rounds_bar

        plans = split_plans(self.plans)
        lengths = None if self.at is None else split_lengths(self.at, "at")
        self.check_json()
        model = load(self.model)
        with rounds_bar(self.rounds if lengths is None else len(lengths)) as watch:
            if lengths is None:
                results = bench(
                    model, plans, frames=self.frames, rounds=self.rounds, command=command,
                    watch=watch,
                )  # fmt: skip
            else:
                results = bench_lengths(
                    model, plans, lengths=lengths, rounds=self.rounds, command=command, watch=watch
                )
        print(*lines(results), sep="\n")
        self.emit(results)
