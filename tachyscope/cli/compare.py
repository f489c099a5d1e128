"""`tachyscope compare`: plans side by side, or two videos."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tachyscope.cli.options import MODEL, PLAN, VideoVerb, check_plan, promise_memory
from tachyscope.cli.verb import PathText, option, options_of, required
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.limits import check

OF_VIDEOS = ("model", "reference", "out")  # options of a comparison of two videos
VIDEO_FILES = (".mp4", ".mkv", ".mov", ".webm", ".avi")
OF_CERTIFICATE = ("model", "weights", "device", "certify")  # and a certificate, which is fixed


@dataclass(frozen=True, kw_only=True)
class Compare(VideoVerb):
    """Generate a video by several plans, played at true relative speed; or compare two videos."""

    model: str = required(f"{MODEL} Or a video file.", positional=True)
    reference: PathText | None = option(
        None, "A video file that the first, a video file too, is compared with.", positional=True
    )
    plans: str = option(f"dense;{PLAN}", "Plans, separated by ';'; the first is the reference.")
    seed: int = option(
        0, "Same seed, same video, up to rounding on another device or with other threads."
    )
    out: Path | None = option(
        None,
        "Folder for compare.mp4, a video of each plan, report.html and compare.json: out unless "
        "given. Of two videos compare.json is written if it is given.",
    )
    sweep: Literal["past"] | None = option(
        None,
        "Instead, run the last plan with several values of past_weight and say which to take, if "
        "any: half of --frames along the actions, the other half the same way back (a model "
        "without actions goes on with its prompt).",
    )
    certify: Path | None = option(
        None,
        "Instead, measure a published model by a fixed protocol (five prompts; dense, stock, fast "
        "and live; 240 and 1,000 frames), into this folder; run again, it resumes.",
    )

    def run(self, command: str) -> None:
        if self.reference is not None:
            self._videos(self.reference, command)
            return
        if self.model.lower().endswith(VIDEO_FILES):
            raise TachyscopeError(
                f"a video is compared with another one, got {self.model} alone: name the second"
            )
        if self.certify is not None:
            self._certificate(self.certify, command)
            return
        if self.sweep is not None:
            self._sweep(command)
            return
        from tachyscope.core.arguments import parse_actions
        from tachyscope.core.request import chunks_for
        from tachyscope.io.files import check_folder
        from tachyscope.measure.bench import split_plans
        from tachyscope.measure.compare import compare
        from tachyscope.measure.progress import progress
        from tachyscope.measure.runs import run_lines

        plans = [check_plan(plan, self.model) for plan in split_plans(self.plans)]
        options = self.rollout_options()
        options["seed"] = check("seed", self.seed)
        out = check_folder(self._folder)
        with progress(self.frames) as watch:
            watch.stage(f"loading {self.model}")
            begun = time.perf_counter()
            model = self.load()
            load_s = time.perf_counter() - begun
            if model.compiling_pays(
                chunks_for(model, model.shape(options["size"]).chunk, 0, self.frames)
            ):
                watch.stage(f"compiling {self.model}")
                model.compile()
            watch.stage("")
            visit, walk = self.visit(model)
            parse_actions(walk["actions"], model.actions, self.frames)
            _, first_line = promise_memory(
                model, self.model, plans, frames=self.frames, size=options["size"],
                prompt=walk.get("prompt", options["prompt"]), given=len(walk.get("first", ())),
            )  # fmt: skip
            if first_line:
                print(first_line, flush=True)
            if visit is not None:
                given = len(walk["first"])
                walk |= {"truth": visit.new_frames(given), "judge": visit.judge(given)}
            results = compare(
                model, plans if len(plans) > 1 else plans[0], **(options | walk), out=out,
                command=command, about=self.about(), load_s=load_s, watch=watch.chunk,
                progress=watch,
            )  # fmt: skip
        files = [out / name for name in ("compare.mp4", "report.html")]
        print(results.lead, *run_lines(results.runs), *files, sep="\n")

    def _videos(self, reference: str, command: str) -> None:
        from tachyscope.io.results import emit
        from tachyscope.measure.progress import progress
        from tachyscope.measure.videos import compare_videos, lines

        self._refuse_others(OF_VIDEOS, "is for a model, got two videos")
        with progress() as watch:
            watch.stage("comparing two videos")
            results = compare_videos(self.model, reference, command)
        print(*lines(results), sep="\n")
        if self.out is not None:
            from tachyscope.io.files import check_folder

            emit(results, str(check_folder(self.out) / "compare.json"))

    def _sweep(self, command: str) -> None:
        from tachyscope.io.files import check_folder
        from tachyscope.io.results import emit
        from tachyscope.measure.bench import split_plans
        from tachyscope.measure.progress import progress
        from tachyscope.measure.sweep import about, lines, sweep_past

        if self.world is not None:
            raise TachyscopeError("a sweep needs no truth, got --world: leave it out")
        plan = check_plan(split_plans(self.plans)[-1], self.model)
        options = self.rollout_options() | {"seed": check("seed", self.seed)}
        where = check_folder(self._folder) / "sweep.json"
        with progress(self.frames) as watch:
            watch.stage(f"loading {self.model}")
            model = self.load()
            watch.stage("")
            print(about(model, plan, self.frames), flush=True)
            results = sweep_past(
                model, plan, **options, actions=self.actions, command=command, watch=watch.chunk
            )
        emit(results, str(where))
        print(*lines(results), *filter(None, [self.about()]), where, sep="\n")

    def _certificate(self, out: Path, command: str) -> None:
        from tachyscope.measure.certify import certify
        from tachyscope.measure.progress import progress

        self._refuse_others(OF_CERTIFICATE, "is not for a certificate, whose form is fixed")
        with progress() as watch:
            watch.stage(f"loading {self.model}")
            model = self.load()
            watch.stage("")
            certify(
                model, out, command=command,
                watch=lambda done, of: watch.part("certificate", done, of, "frames"),
            )  # fmt: skip
        print(*(out / f"certificate.{kind}" for kind in ("html", "json")), sep="\n")

    @property
    def _folder(self) -> Path:
        return Path("out") if self.out is None else self.out

    def _refuse_others(self, allowed: tuple[str, ...], why: str) -> None:
        """Raise where an option was given that this form of the verb does not take."""
        for one in options_of(type(self)):
            if one.name not in allowed and getattr(self, one.name) != one.default:
                raise TachyscopeError(f"{one.flag} {why}: leave it out")
