"""Results documents: what was measured, when, on which machine, by which command; as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.types import Chunk
from tachyscope.io.files import check_file, is_stream, user_path, write_atomically
from tachyscope.io.machine import machine, versions
from tachyscope.weights import weights_hashes

Document = dict[str, Any]


def document(
    suite: str,
    rows: Sequence[Document],
    command: str = "",
    aa: tuple[float, float] | None = None,
    **more: Any,
) -> Document:
    """A results document of measured rows.

    `weights` has the hash of every shipped model that a row (or `model` in `more`) names.
    """
    names = {str(row.get("model")) for row in (*rows, more)}
    head: Document = {
        "schema": 1,
        "suite": suite,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": machine(),
        "versions": versions(),
        "command": command,
    }
    if hashes := weights_hashes(names):
        head["weights"] = hashes
    if aa is not None:
        head["aa"] = {"low": aa[0], "high": aa[1]}
    return head | more | {"rows": list(rows)}


def size_of(chunk: Chunk) -> str:
    """A chunk's size as `--size` takes it: HEIGHTxWIDTH."""
    return "{}x{}".format(*chunk.frames.shape[1:3])


def to_json(value: Document, indent: int | None = None) -> str:
    """Strict JSON: infinity and NaN become null."""
    separators = (",", ":") if indent is None else None
    return json.dumps(_finite(value), indent=indent, separators=separators, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_json(where: str | None) -> None:
    """Raise if a document could not be written, before anything is measured."""
    if where is not None and where != "-":
        check_file(user_path(where, "`json`"))


def read_results(path: Path, suite: str) -> Document:
    """Read a document of a suite."""
    try:
        results = json.loads(path.read_text())
        rows = results["rows"] if results["suite"] == suite else None
        fits = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        fits = False
    if not fits:
        raise TachyscopeError(f"{path} is no results file of {suite}: give one, or none")
    return dict(results)


def emit(results: Document, where: str | None) -> None:
    """Write a document to a file, or to stdout as one line for `-`; not at all for None."""
    if where == "-":
        print(to_json(results))
    elif where is not None:
        write_atomically(user_path(where), to_json(results, indent=2) + "\n")


class Parts:
    """Parts of a measurement, saved to a file one by one, so that it can be resumed.

    The file is a results document: its rows are the parts, each with its name as `part`, and it is
    marked `unfinished` until `emit` replaces it. With `resume`, the parts in an existing file are
    not measured again; a file of other settings, weights or another machine is refused. Without a
    regular file nothing is saved.
    """

    def __init__(
        self,
        where: str | None = None,
        settings: Mapping[str, Any] | None = None,
        resume: bool = False,
        command: str = "",
    ) -> None:
        writes = where is not None and where != "-" and not is_stream(user_path(where, "`json`"))
        if resume and not writes:
            raise TachyscopeError(
                f"`resume` continues a file of results, got {where}: give --json FILE"
            )
        self.settings: Document = _as_read(settings or {})
        self._path = user_path(where) if writes and where is not None else None
        self._resume = resume
        self._command = command
        self._suite = ""
        self._rows: dict[str, Document] = {}
        self._weights: dict[str, str] = {}

    def begin(self, suite: str, model: str, fingerprint: str) -> None:
        """Start to measure a model with these weights; raises if the file has others."""
        first = not self._suite
        self._suite = self._suite or suite
        if self._resume and first and self._path is not None and self._path.exists():
            self._read(self._path)
        theirs = self._weights.setdefault(model, fingerprint)
        if theirs != fingerprint:
            raise TachyscopeError(
                f"{self._path} was measured with other weights of {model} ({theirs[:12]}, now "
                f"{fingerprint[:12]}): choose another file, or leave `resume` out"
            )

    def _read(self, path: Path) -> None:
        document = read_results(path, self._suite)
        if "settings" not in document:
            raise TachyscopeError(f"{path} is finished: leave `resume` out to measure it again")
        theirs = document["settings"] | {"machine": _ran_on(document["machine"])}
        ours = self.settings | {"machine": _ran_on(machine())}
        for key in sorted(theirs.keys() | ours.keys()):
            if theirs.get(key) != ours.get(key):
                raise TachyscopeError(
                    f"{path} was measured with another {key} ({theirs.get(key)}, now "
                    f"{ours.get(key)}): choose another file, or leave `resume` out"
                )
        self._weights = dict(document.get("fingerprints", {}))
        self._rows = {str(row["part"]): row for row in document["rows"]}

    def get(self, name: str) -> Document | None:
        """A measured part, or None."""
        return self._rows.get(name)

    def add(self, name: str, row: Document) -> Document:
        """Save a part, and return it as it will be read: NaN and infinity are None."""
        self._rows[name] = _as_read(row | {"part": name})
        if self._path is not None:
            emit(self.document(unfinished=True), str(self._path))
        return self._rows[name]

    def document(self, **more: Any) -> Document:
        """The document whose rows are all parts."""
        return document(
            self._suite, list(self._rows.values()), self._command, settings=self.settings,
            fingerprints=self._weights, **more,
        )  # fmt: skip


def _as_read(value: Mapping[str, Any]) -> Document:
    return dict(json.loads(to_json(dict(value))))


def _ran_on(machine: Mapping[str, Any]) -> str:
    return str(machine.get("gpu") or machine.get("cpu"))
