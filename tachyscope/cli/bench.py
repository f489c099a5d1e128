"""`tachyscope bench`."""

from __future__ import annotations

from dataclasses import dataclass

from tachyscope.cli.options import MODEL, check_plan
from tachyscope.cli.verb import ResultsVerb, option


@dataclass(frozen=True, kw_only=True)
class Bench(ResultsVerb):
    """Time plans on this CPU in turns, each speed-up beside the difference of two dense runs."""

    model: str = option("toy-chunks", MODEL, positional=True)
    plans: str = option("fast;balanced", "Plans, separated by ';'.")
    frames: int = option(48, "Pixel frames of every run.")
    rounds: int = option(5, "How often each plan is run.")
    at: str | None = option(
        None,
        "Latent frames, separated by commas: time single chunks after so many, their caches "
        "filled with random entries, instead of whole runs.",
    )

    def run(self, command: str) -> None:
        from tachyscope.measure.bench import bench, bench_lengths, lines, split_lengths, split_plans
        from tachyscope.measure.progress import progress
        from tachyscope.models.registry import MODELS, load

        plans = [check_plan(plan, self.model) for plan in split_plans(self.plans)]
        lengths = None if self.at is None else split_lengths(self.at, "at")
        self.check_json()
        with progress() as watch:
            watch.stage(f"loading {self.model}")
            model = load(self.model)
            watch.stage("")
            if lengths is None:
                watch.part("bench", 0, self.rounds, "rounds")
                results = bench(
                    model, plans, frames=self.frames, rounds=self.rounds, command=command,
                    watch=lambda done: watch.part("bench", done, self.rounds, "rounds"),
                )  # fmt: skip
            else:
                total = len(lengths)
                watch.part("bench", 0, total, "lengths")
                results = bench_lengths(
                    model, plans, lengths=lengths, rounds=self.rounds, command=command,
                    watch=lambda done: watch.part("bench", done, total, "lengths"),
                )  # fmt: skip
        print(*lines(results), sep="\n")
        if lengths is None and self.model in MODELS and MODELS[self.model].random:
            print(
                f"{self.model} is a tiny random model for tests; to time plans after a long past: "
                f"tachyscope bench atrium-world --at 300"
            )
        self.emit(results)
