"""`tachyscope-lab bench ranks`."""

from __future__ import annotations

from dataclasses import dataclass

from tachyscope.cli.verb import ResultsVerb, option, required
from tachyscope.core.limits import check


@dataclass(frozen=True, kw_only=True)
class BenchRanks(ResultsVerb):
    """Predict one stream over 2 and 4 GPUs, from `bench wan` on one and from what travels."""

    measured: str = required("A document of `bench wan`, by its file.", positional=True)
    link: float = option(55.4, "GB/s that a GPU sends: 55.4 is PCIe as measured, NVLink has more.")

    def run(self, command: str) -> None:
        check("memory_gb", self.link, "`link`")
        self.check_json()
        from pathlib import Path

        from tachyscope.models.checkpoint import read_json
        from tachyscope_lab.bench.ranks import lines, predict_ranks

        results = predict_ranks(read_json(Path(self.measured)), link=self.link, command=command)
        if self.prints:
            print(*lines(results), sep="\n")
        self.emit(results)
