"""The index of `results/`: what each entry is, when and where it was made, and by which command."""

from __future__ import annotations

from tachyscope_lab.results import Document, Results
from tachyscope_lab.tables.markdown import table


def index(results: Results) -> str:
    rows = []
    for suite in results.suites:
        for name, entry in results.entries(suite).items():
            rows.append([
                f"`{suite}`: {name}", entry["about"], f"{entry['date']}, {_machine(entry)}",
                f"`{entry['command']}`",
            ])  # fmt: skip
    return table(["entry", "what", "made", "command"], rows)


def _machine(entry: Document) -> str:
    machine = entry.get("machine", {})
    return str(machine.get("gpu") or f"{machine.get('cpu', 'CPU')}, {machine.get('cores')} cores")
