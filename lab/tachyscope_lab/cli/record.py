"""`tachyscope-lab record`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tachyscope.cli.verb import ResultsVerb, option, required
from tachyscope.core.errors import TachyscopeError


@dataclass(frozen=True, kw_only=True)
class Record(ResultsVerb):
    """Put a measurement that --json wrote into results/SUITE.json, as the entry of a name."""

    file: Path = required("The file that --json wrote.", positional=True)
    suite: str = required("The suite: a file of results/ by its name.")
    name: str = required("The entry's name; an entry of this name is replaced.")
    about: str = option("", "What it is, in one line; kept from the entry that is replaced.")

    def run(self, command: str) -> None:
        import json

        from tachyscope_lab.results import RESULTS, Results, add_entry

        try:
            document = json.loads(self.file.read_text())
            fits = isinstance(document["rows"], list) and isinstance(document["command"], str)
        except (OSError, ValueError, TypeError, KeyError):
            fits = False
        if not fits:
            raise TachyscopeError(f"{self.file} is no results file: give one that --json wrote")
        known = Results().entries(self.suite) if self.suite in Results().suites else {}
        about = self.about or known.get(self.name, {}).get("about", "")
        if not about:
            raise TachyscopeError(f"{self.name!r} is a new entry of {self.suite}: give --about")
        print(f"wrote {add_entry(RESULTS, self.suite, self.name, about, document)}")
