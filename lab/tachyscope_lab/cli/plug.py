"""`tachyscope-lab plug`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tachyscope.cli.verb import Verb, option, required


@dataclass(frozen=True, kw_only=True)
class Plug(Verb):
    """Run others' code on small random weights: with accelerate, or a world model beside ours."""

    family: str = required(
        "Whose code: self-forcing, causvid, reward-forcing, longlive (its first version), "
        "infinite-forcing, rolling-forcing or krea; a world model's name; or diffusers.",
        positional=True,
    )
    source: Path | None = option(
        None, "A clone of the repository, at the commit to run; none for an installed package."
    )
    json: str | None = option(None, "Write the rows to this file, or to standard output by -.")

    def run(self, command: str) -> None:
        from tachyscope.io.results import check_json, document, emit
        from tachyscope.io.tables import format_table
        from tachyscope_lab import plug

        check_json(self.json)
        rows = plug.run(self.family, self.source)
        cells = [
            (row["check"], row["plan"], f"{row['error']:.1e}", "yes" if row["equal"] else "")
            for row in rows
            if "error" in row
        ]
        columns = ("check", "plan", "relative error", "equal to the bit")
        print(*format_table(columns, cells), sep="\n")
        emit(document("plug", rows, command), self.json)
