"""The folder `results/`: one JSON file a suite, in which every entry is one measurement.

An entry is a results document as `--json` writes it (date, machine, versions, command, hashes of
weights, rows), with a name and a line that says what it is. `results/` holds the latest of each;
what was measured before stands in git's history.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from tachyscope.core.errors import TachyscopeError
from tachyscope.io.files import write_atomically
from tachyscope.io.results import Parts, read_results

Document = dict[str, Any]
Row = Mapping[str, Any]
T = TypeVar("T")
SCHEMA = 2
RESULTS = Path(__file__).parents[2] / "results"
FIRST = ("name", "about")  # keys that an entry begins with


class Results:
    """The suites of a folder, each read once."""

    def __init__(self, folder: Path = RESULTS) -> None:
        self.folder = folder
        self._read = cache(self._suite)

    @property
    def suites(self) -> list[str]:
        return sorted(path.stem for path in self.folder.glob("*.json"))

    def entries(self, suite: str) -> dict[str, Document]:
        """A suite's measurements by name."""
        return self._read(suite)

    def entry(self, suite: str, name: str) -> Document:
        """One measurement."""
        found = self.entries(suite)
        if name not in found:
            raise TachyscopeError(
                f"results of {suite} have no entry {name!r}: choose one of {', '.join(found)}"
            )
        return found[name]

    def rows(self, suite: str, name: str) -> list[Document]:
        """The rows of one measurement."""
        return list(self.entry(suite, name)["rows"])

    def by(self, suite: str, name: str, key: str = "asked") -> dict[str, Document]:
        """The rows of one measurement by a key of theirs; of equal ones the last."""
        return {str(row[key]): row for row in self.rows(suite, name)}

    def _suite(self, suite: str) -> dict[str, Document]:
        return {str(entry["name"]): entry for entry in read_suite(self.folder / f"{suite}.json")}


def read_suite(path: Path) -> list[Document]:
    """The entries of a suite's file."""
    try:
        document = json.loads(path.read_text())
        entries = document["entries"]
        fits = isinstance(entries, list) and document["suite"] == path.stem
        fits = fits and all({*FIRST, "command", "rows"} <= entry.keys() for entry in entries)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        fits = False
    if not fits:
        raise TachyscopeError(f"{path} is no file of a suite: restore it, or name another")
    return [dict(entry) for entry in entries]


def rows_of(path: Path, suite: str) -> list[Document]:
    """The rows of a results file as --json writes it, or those of all entries of a suite's file."""
    try:
        entries = json.loads(path.read_text()).get("entries")
    except (OSError, ValueError, AttributeError):
        entries = None
    if entries is None:
        return list(read_results(path, suite)["rows"])
    return [
        row for entry in read_suite(path) if entry.get("suite") == suite for row in entry["rows"]
    ]


def add_entry(folder: Path, suite: str, name: str, about: str, document: Document) -> Path:
    """Put a results document into a suite's file, in the place of the entry of that name."""
    path = folder / f"{suite}.json"
    entries = read_suite(path) if path.exists() else []
    own = {"name": name, "about": about}
    new = own | {key: value for key, value in document.items() if key not in (*FIRST, "schema")}
    names = [entry["name"] for entry in entries]
    if name in names:
        entries[names.index(name)] = new
    else:
        entries.append(new)
    write_atomically(path, to_text(suite, entries))
    return path


def to_text(suite: str, entries: list[Document]) -> str:
    """A suite's file: a line for every key of an entry and for every row, so that diffs show it."""
    parts = []
    for entry in entries:
        rows = ",\n".join(f"    {_line(row)}" for row in entry["rows"])
        head = [f"   {_line(key)}: {_line(entry[key])}" for key in entry if key != "rows"]
        parts.append("  {\n" + ",\n".join(head) + f',\n   "rows": [\n{rows}\n   ]\n  }}')
    body = ",\n".join(parts)
    return f'{{\n "schema": {SCHEMA},\n "suite": {_line(suite)},\n "entries": [\n{body}\n ]\n}}\n'


def _line(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def run_parts(
    parts: Parts,
    tasks: Sequence[T],
    name: Callable[[T], str],
    measure: Callable[[Sequence[T]], Iterable[Document]],
) -> Iterator[Document]:
    """The parts of all tasks in order; `measure` is given those that are still to be done."""
    left = [task for task in tasks if parts.get(name(task)) is None]
    measured = iter(measure(left)) if left else iter(())
    for task in tasks:
        known = parts.get(name(task))
        yield parts.add(name(task), next(measured)) if known is None else known
