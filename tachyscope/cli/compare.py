"""`tachyscope compare`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from tachyscope.cli.verb import option, required
from tachyscope.cli.video import CompiledVerb

# in which dtype a second dense run shows how far two of them agree
OTHER_DTYPE = {"float32": "float64", "float64": "float32", "bfloat16": "float32"}


@dataclass(frozen=True, kw_only=True)
class Compare(CompiledVerb):
    """Make a video dense and by a plan, with the same seed, prompt and actions."""

    out: Path = required(
        "Folder for compare.mp4, dense.mp4, plan.mp4, report.html and compare.json."
    )
    plan: str = option(
        "fast", "A name that `tachyscope methods` lists, or one with changes: 'fast replay=none'."
    )
    floor: bool = option(
        True, "Play dense in a second dtype too: from where the two part, closeness says nothing."
    )
    aa: bool = option(
        True, "Play dense twice: a ratio of speeds is given only beside the noise that this shows."
    )

    def run(self, command: str) -> None:
        from tachyscope.compare import compare, tell_floor
        from tachyscope.files import check_folder
        from tachyscope.progress import frames_bar
        from tachyscope.runs import run_lines

        text, options = self.plan_text(), self.rollout_options()
        self.check_json()
        check_folder(self.out)
        begun = time.perf_counter()
        model = self.load()
        twin = self.load(OTHER_DTYPE[self.dtype]) if self.floor else None
        load_s = time.perf_counter() - begun
        self.compile_layers(model)
        visit, walk = self.visit(model)
        if visit is not None:
            walk["truth"] = visit.new_frames(self.given)
        with frames_bar(self.frames, self.quiet) as watch:
            results = compare(
                model, text, **(options | walk), out=self.out, twin=twin, aa=self.aa,
                command=command, about=self.about(), load_s=load_s, watch=watch,
            )  # fmt: skip
        if not self.quiet:
            files = [self.out / name for name in ("compare.mp4", "report.html")]
            print(results.lead, *run_lines(results.runs), tell_floor(results), *files, sep="\n")
        self.emit(results.document)
