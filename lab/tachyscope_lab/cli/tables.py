"""`tachyscope-lab tables`."""

from __future__ import annotations

from dataclasses import dataclass

from tachyscope.cli.verb import ResultsVerb, option
from tachyscope.core.errors import TachyscopeError


@dataclass(frozen=True, kw_only=True)
class Tables(ResultsVerb):
    """Write the marked tables of README.md and docs/*.md from results/."""

    check: bool = option(False, "Write nothing; fail where a page differs from results/.")
    show: str | None = option(None, "Print the table of this name, and write nothing.")

    def run(self, command: str) -> None:
        from tachyscope_lab.results import Results
        from tachyscope_lab.tables import ROOT, TABLES, write_pages

        results = Results()
        if self.show is not None:
            if self.show not in TABLES:
                raise TachyscopeError(
                    f"there is no table {self.show!r}: choose one of {', '.join(TABLES)}"
                )
            print(TABLES[self.show](results))
            return
        changed = [str(path.relative_to(ROOT)) for path in write_pages(results, check=self.check)]
        if changed and self.check:
            raise TachyscopeError(
                f"tables of {', '.join(changed)} differ from results/: run tachyscope-lab tables"
            )
        print(*(f"wrote {path}" for path in changed), sep="\n")
