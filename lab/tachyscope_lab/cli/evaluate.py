"""`tachyscope-lab eval`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tachyscope.cli.verb import RESUME, PathText, ResultsVerb, option, options_of, required
from tachyscope.core.errors import TachyscopeError, shown
from tachyscope.core.limits import check

WORLD = "atrium"
OF_VIDEOS = ("what", "reference", "json")  # options that two videos take


@dataclass(frozen=True, kw_only=True)
class Evaluate(ResultsVerb):
    """Measure models and plans in unseen worlds whose truth is known, or one video by another."""

    what: PathText = required(
        "atrium, the world; or a video file to hold against another.", positional=True
    )
    reference: PathText | None = option(
        None, "The video file that the first is held against.", positional=True
    )
    plan: tuple[str, ...] = option(
        (),
        "A plan of the world model, or with --only tokens of the token model, a name or one with "
        "changes; may be given several times. Without any: dense, balanced, fast.",
    )
    table: str | None = option(
        None,
        "Plans of a table, beside dense: readme, papers, memory, budgets, matching, "
        "long or methods.",
    )
    only: Literal["both", "world", "tokens", "views", "loops", "regimes"] = option(
        "both",
        "One of the two models; views: what a prompt names at first sight, in 200 worlds; loops: "
        "replay, return, loops, mirror and a switch of the prompt; regimes: --regimes.",
    )
    regimes: str = option(
        "",
        "Plans beside dense by pace and by how long a past lies behind a view that comes back: "
        "names separated by commas of slow, half, long, short, walk, far; all of them with --only "
        "regimes.",
    )
    worlds: int | None = option(
        None,
        "How many worlds; intervals are over them. 16 if not given, 4 when it must be quick.",
    )
    seed: int = option(0, "Another seed, other worlds: world N of seed S is room 1000 S + N.")
    frames: int = option(48, "Pixel frames that each plan makes in a world.")
    quick: bool = option(False, "Fewer worlds, frames and measures.")
    recall: bool = option(True, "Measure each plan's recall of dense attention's mass.")
    plans_only: bool = option(False, "Measure plans, and nothing of the model itself.")
    own: bool = option(False, "Measure plans' memory of what the model made up itself.")
    clock: bool = option(True, "Take the time of a token.")
    runs: int = option(
        1,
        "Rollouts of every plan in a world, each with noise of its own: values are their means, "
        "and bands say how far they lie apart.",
    )
    pace: float = option(
        1.0,
        "The part of a step that a frame takes, 1 over a whole number, of a world model whose "
        "camera is told: 1 is 15 degrees of a turn.",
    )
    weights: PathText | None = option(
        None, "A folder of a world model that training wrote, instead of the shipped one."
    )
    device: str = option("cpu", "cpu, cuda or cuda:N; a token's time is always taken on the CPU.")
    jobs: int | None = option(
        None, "Processes; as many as cores if not given, on a GPU 2, with MPS 7."
    )
    resume: bool = option(False, RESUME)

    def run(self, command: str) -> None:
        if self.what == WORLD and self.reference is None:
            self._run_world(command)
        elif self.what != WORLD and self.reference is not None:
            self._run_videos(self.what, self.reference, command)
        else:
            raise TachyscopeError(
                f"eval takes {WORLD}, or two video files, got "
                f"{' and '.join(shown(x) for x in (self.what, self.reference) if x)}: try eval "
                f"{WORLD}, or eval A.mp4 B.mp4"
            )

    def _run_videos(self, path: str, reference: str, command: str) -> None:
        from tachyscope.measure.videos import compare_videos, lines

        default = {one.name: one.default for one in options_of(type(self))}
        given = [
            name
            for name, value in default.items()
            if name not in OF_VIDEOS and getattr(self, name) != value
        ]
        if given:
            raise TachyscopeError(
                f"--{given[0].replace('_', '-')} is of worlds, got two videos: leave it out"
            )
        self.check_json()
        results = compare_videos(path, reference, command)
        if self.prints:
            print(*lines(results), sep="\n")
        self.emit(results)

    def _run_world(self, command: str) -> None:
        from tachyscope.core.plan import check_text
        from tachyscope.measure.progress import parts_bar
        from tachyscope.models.registry import find_device
        from tachyscope_lab.evaluation.atrium import evaluate_atrium, lines
        from tachyscope_lab.evaluation.plan_tables import table

        # faults show before it is said that this takes minutes
        if self.worlds is not None:
            check("worlds", self.worlds)
        check("seed", self.seed)
        check("pace", self.pace)
        check("runs", self.runs)
        wanted = [x for x in self.regimes.split(",") if x]
        if wanted and self.only not in ("both", "regimes"):
            raise TachyscopeError(
                f"`regimes` are a measurement of their own, got them with --only {self.only}: "
                f"leave it out"
            )
        plans = [*(table(self.table) if self.table else []), *self.plan]
        for text in plans:
            check_text(text, "tokens" if self.only == "tokens" else "chunks")
        find_device(self.device)
        self.check_json()
        parts = self.parts(command)
        with parts_bar() as watch:
            results = evaluate_atrium(
                plans, only="regimes" if wanted else self.only, regimes=wanted,
                worlds=self.worlds, device=self.device, seed=self.seed,
                quick=self.quick, command=command, watch=watch, frames=self.frames,
                recall=self.recall, world=not self.plans_only, own=self.own, jobs=self.jobs,
                timed=self.clock, pace=self.pace, weights=self.weights, runs=self.runs, parts=parts,
            )  # fmt: skip
        if self.prints:
            print(*lines(results), sep="\n")
        self.emit(results)
