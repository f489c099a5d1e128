"""`tachyscope race`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from tachyscope.cli.verb import option, required
from tachyscope.cli.video import CompileOptions, kind_of


@dataclass(frozen=True, kw_only=True)
class Race(CompileOptions):
    """Make a video by several plans, each alone, and show them side by side in relative time."""

    out: Path = required("Folder for race.mp4, race.html and race.json.")
    plans: str = option("dense;fast", "Plans, set apart by ';'.")
    speed: float | None = option(
        None,
        "How much faster than it happened the video shows it; left out, 1, or what makes it a "
        "minute long.",
    )

    def run(self, command: str) -> None:
        from tachyscope.bench.cpu import split_plans
        from tachyscope.bounds import check
        from tachyscope.files import check_folder
        from tachyscope.plan import check_text
        from tachyscope.progress import frames_bar
        from tachyscope.race import race
        from tachyscope.runs import run_lines

        plans, options = split_plans(self.plans), self.rollout_options()
        for text in plans:
            check_text(text, kind_of(self.model))
        if self.speed is not None:
            check("speed", self.speed)
        self.check_json()
        check_folder(self.out)
        begun = time.perf_counter()
        model = self.load()
        load_s = time.perf_counter() - begun
        self.compile_layers(model)
        visit, walk = self.visit(model)
        if visit is not None:
            walk["truth"] = visit.new_frames(self.given)
        with frames_bar(self.frames, self.quiet) as watch:
            results = race(
                model, plans, **(options | walk), out=self.out, speed=self.speed, command=command,
                about=self.about(), load_s=load_s, watch=watch,
            )  # fmt: skip
        if not self.quiet:
            files = [self.out / name for name in ("race.mp4", "race.html")]
            print(results.lead, *run_lines(results.runs), *files, sep="\n")
        self.emit(results.document)
