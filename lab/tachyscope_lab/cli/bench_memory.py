"""`tachyscope-lab bench memory`."""

from __future__ import annotations

from dataclasses import dataclass

from tachyscope.cli.verb import ResultsVerb, option


@dataclass(frozen=True, kw_only=True)
class BenchMemory(ResultsVerb):
    """RAM that `generate` promises on a CPU, what it takes, and whether it ends well held to it."""

    rows: str = option("", "Parts of settings' names, separated by ';'; all where left out.")

    def run(self, command: str) -> None:
        self.check_json()
        from tachyscope_lab.bench.memory import bench_memory, lines

        names = [name.strip() for name in self.rows.split(";") if name.strip()]
        results = bench_memory(names, command, watch=print if self.prints else None)
        if self.prints:
            print(*lines(results), sep="\n")
        self.emit(results)
