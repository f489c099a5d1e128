"""`tachyscope-lab calibrate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tachyscope.cli.verb import PathText, ResultsVerb, option, required


@dataclass(frozen=True, kw_only=True)
class Calibrate(ResultsVerb):
    """Fit what `replay=neurons` needs of a token model: order of neurons, maps of the rest."""

    model: str = required("A token model's name: tachyscope list models has them.", positional=True)
    out: Path = required("The .safetensors file to write.")
    weights: PathText | None = option(
        None, "The checkpoint, where the model's name stands for one."
    )
    clips: int = option(20, "Clips to run, from 1 to 1,000: of all cameras and speeds in turn.")
    share: tuple[float, ...] = option(
        (), "A share of neurons to leave out, between 0 and 1; may be given again. 0.5 and 0.75."
    )
    prompt: tuple[str, ...] = option(
        (), "A prompt of the videos, for models without a world; may be given again."
    )
    first: tuple[PathText, ...] = option(
        (),
        "A video or picture that a video goes on from, for models without a world; may be given "
        "again.",
    )
    seed: int = option(0, "Of the rooms, or of the videos' noise.")
    device: str = option("cpu", "cpu, cuda or cuda:N.")
    dtype: str = option("float32", "float32, float64 or bfloat16.")

    def run(self, command: str) -> None:
        from tachyscope.core.errors import TachyscopeError
        from tachyscope.core.limits import check
        from tachyscope.io.files import check_file
        from tachyscope.io.results import document
        from tachyscope.io.video import read_frames
        from tachyscope.measure.calibrate import SHARES, calibrate, lines
        from tachyscope.measure.progress import parts_bar
        from tachyscope.models.checkpoint import SAFE, write_tensors
        from tachyscope.models.registry import load

        if self.out.suffix not in SAFE:
            raise TachyscopeError(f"--out is a {SAFE[0]} file, got {self.out}: rename it")
        check("seed", self.seed)
        check_file(self.out)
        self.check_json()
        model = load(self.model, self.weights, device=self.device, dtype=self.dtype)
        with parts_bar() as watch:
            calibration = calibrate(
                model, clips=self.clips, shares=self.share or SHARES, prompts=self.prompt,
                first=[read_frames(path) for path in self.first], seed=self.seed, watch=watch,
            )  # fmt: skip
        write_tensors(self.out, calibration.tensors())
        if self.prints:
            print(
                *lines(calibration), f"{self.out}: {self.out.stat().st_size / 1e6:.1f} MB", sep="\n"
            )
        rows = [
            {
                "name": "calibrate", "model": model.name, "clips": self.clips, "share": share,
                "neurons": [len(kept) for kept in calibration.kept(share)],
                "beta": calibration.beta[share].tolist(),
            }
            for share in calibration.maps
        ]  # fmt: skip
        self.emit(document("calibrate", rows, command, speeds=calibration.speeds.tolist()))
