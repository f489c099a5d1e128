"""`tachyscope inspect`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tachyscope.cli.options import PLAN_HELP, VideoVerb, check_plan, read_prompts
from tachyscope.cli.verb import PathText, option
from tachyscope.core.errors import TachyscopeError


@dataclass(frozen=True, kw_only=True)
class Inspect(VideoVerb):
    """Measure which methods can help a model: where time goes, what repeats, what is attended."""

    plan: str = option("dense", PLAN_HELP)
    first: tuple[PathText, ...] = option(
        (), "A video or image file that --fit-neurons' videos continue; may be given several times."
    )
    fit_neurons: Path | None = option(
        None,
        "Fit what replay=neurons needs of a token model instead, and write it to this "
        ".safetensors file.",
    )
    out: Path = option(
        Path("out"), "Folder for inspect.json and the plots: time, similarity and mass."
    )

    def run(self, command: str) -> None:
        if self.fit_neurons is not None:
            self._fit_neurons(self.fit_neurons)
            return
        from tachyscope.io.files import check_folder
        from tachyscope.measure.inspection import inspect_model, lines, write
        from tachyscope.measure.progress import progress

        text, options = check_plan(self.plan, self.model), self.rollout_options()
        if self.first:
            raise TachyscopeError(
                f"--first is for --fit-neurons, got {self.first[0]} alone: leave it out"
            )
        check_folder(self.out)
        with progress(self.frames) as watch:
            watch.stage(f"loading {self.model}")
            model = self.load()
            watch.stage("")
            options |= self.visit(model)[1]
            results = inspect_model(model, text, **options, command=command, watch=watch.chunk)
        paths = write(results, self.out)
        print(*lines(results), "", *paths, sep="\n")

    def _fit_neurons(self, path: Path) -> None:
        from tachyscope.io.files import check_file
        from tachyscope.io.video import read_frames
        from tachyscope.measure.calibrate import calibrate, lines
        from tachyscope.measure.progress import parts_bar
        from tachyscope.models.checkpoint import SAFE, write_tensors

        if path.suffix not in SAFE:
            raise TachyscopeError(f"--fit-neurons is a {SAFE[0]} file, got {path}: rename it")
        check_file(path)
        text, file, _ = read_prompts(self.prompt)
        if file is not None:
            raise TachyscopeError(f"--fit-neurons takes prompts in words, got @{file}")
        model = self.load()
        with parts_bar() as watch:
            calibration = calibrate(
                model, prompts=[text] if text else [], watch=watch,
                first=[read_frames(name) for name in self.first],
            )  # fmt: skip
        write_tensors(path, calibration.tensors())
        print(*lines(calibration), f"{path}: {path.stat().st_size / 1e6:.1f} MB", sep="\n")
