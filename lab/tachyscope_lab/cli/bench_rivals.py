"""`tachyscope-lab bench rivals`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tachyscope.cli.verb import RESUME, PathText, ResultsVerb, option, required


@dataclass(frozen=True, kw_only=True)
class BenchRivals(ResultsVerb):
    """Measure every method at equal bytes and at equal pairs read, against the truth of rooms."""

    out: Path = required("Folder for rivals.json, written after every row, and the plots.")
    rows: str | None = option(
        None,
        "Names of methods, or of groups (bytes, pairs, published, long), separated by ';', instead "
        "of all.",
    )
    worlds: int = option(16, "How many rooms; intervals are over them.")
    seed: int = option(0, "Another seed, other rooms.")
    frames: int = option(208, "Pixel frames that each method makes in a room.")
    long_frames: int = option(1000, "Those of dense, window, dedup and banks in long videos.")
    runs: int = option(3, "Rollouts of each of these in a room.")
    paces: str = option(
        "1,0.25",
        "Parts of a step that a frame takes, separated by commas; below 1 needs a world model "
        "whose camera is told, and is left out without.",
    )
    weights: PathText | None = option(
        None, "A folder of a world model that training wrote, instead of the shipped one."
    )
    device: str = option("cpu", "cpu, cuda or cuda:N.")
    jobs: int | None = option(
        None, "Processes, each with a method of its own; on a GPU 2, with MPS 7."
    )
    seconds: int = option(540, "No row is begun after so many seconds.")
    resume: bool = option(False, RESUME)
    plot: bool = option(False, "Measure nothing: draw and print the rivals.json of the folder.")

    def run(self, command: str) -> None:
        from tachyscope.core.limits import check, number
        from tachyscope.io.files import check_folder
        from tachyscope.io.results import emit, read_results
        from tachyscope.models.registry import find_device
        from tachyscope_lab.evaluation.rivals import bench_rivals, lines

        paces = [check("pace", number(word, "--paces")) for word in self.paces.split(",")]
        rows = [word.strip() for word in (self.rows or "").split(";") if word.strip()]
        find_device(self.device)
        self.check_json()
        file = check_folder(self.out) / "rivals.json"
        if self.plot:
            results = read_results(file, "rivals")
        else:
            results = bench_rivals(
                rows=rows, weights=self.weights, device=self.device, worlds=self.worlds,
                seed=self.seed, frames=self.frames, long_frames=self.long_frames, runs=self.runs,
                paces=paces, jobs=self.jobs, seconds=self.seconds,
                parts=self.parts(command, str(file)),
                report=lambda line: print(line, file=sys.stderr, flush=True),
            )  # fmt: skip
            emit(results, str(file))
        if results["rows"] and find_spec("matplotlib") is not None:
            from tachyscope_lab.evaluation.rivals_plot import draw

            draw(results, self.out)
        if self.prints:
            print(*lines(results), file, sep="\n")
        self.emit(results)
