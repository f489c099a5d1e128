"""`tachyscope inspect`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tachyscope.bounds import check
from tachyscope.cli.verb import option, required
from tachyscope.cli.video import VideoVerb


@dataclass(frozen=True, kw_only=True)
class Inspect(VideoVerb):
    """Measure why the methods can work on a model: time, likeness of frames, attention's mass."""

    out: Path = required(
        "Folder for inspect.json and the plots: time, similarity and mass, as PNG and SVG."
    )
    rounds: int = option(3, "How many rollouts are timed, beside the one that is observed.")

    def run(self, command: str) -> None:
        from tachyscope.files import check_folder
        from tachyscope.inspection import inspect_model, lines, write
        from tachyscope.progress import frames_bar

        text, options = self.plan_text(), self.rollout_options()
        check("rounds", self.rounds)
        self.check_json()
        check_folder(self.out)
        model = self.load()
        options |= self.visit(model)[1]
        with frames_bar(self.frames, self.quiet) as watch:
            results = inspect_model(
                model, text, **options, rounds=self.rounds, command=command, watch=watch
            )
        paths = write(results, self.out)
        if not self.quiet:
            print(*lines(results), "", *paths, sep="\n")
        self.emit(results)
