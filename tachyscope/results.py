"""A results document: what was measured, when, on what, and by which command; as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tachyscope.errors import TachyscopeError
from tachyscope.files import check_file, user_path, write_atomically
from tachyscope.machine import machine, versions
from tachyscope.types import Chunk
from tachyscope.weights import weights_hashes

Document = dict[str, Any]


def document(
    suite: str,
    rows: Sequence[Document],
    command: str = "",
    aa: tuple[float, float] | None = None,
    **more: Any,
) -> Document:
    """A results document: what was measured, when, on what and by which command.

    Of every shipped model that a row (or `model` in `more`) names, `weights` holds the hash.
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
    """A chunk's height and width in pixels, as `--size` takes them."""
    return "{}x{}".format(*chunk.frames.shape[1:3])


def to_json(value: Document, indent: int | None = None) -> str:
    """Strict JSON; a number that JSON has no word for (infinity, not a number) becomes null."""
    separators = (",", ":") if indent is None else None
    return json.dumps(_finite(value), indent=indent, separators=separators, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_json(where: str | None) -> None:
    """Raise where a document could not be written, before it is measured."""
    if where is not None and where != "-":
        check_file(user_path(where, "`json`"))


def read_results(path: Path, suite: str) -> Document:
    """A document of a suite, as `emit` wrote it."""
    try:
        found = json.loads(path.read_text())
        rows = found["rows"] if found["suite"] == suite else None
        fits = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
    except (OSError, ValueError, TypeError, KeyError):
        fits = False
    if not fits:
        raise TachyscopeError(f"{path} is no results file of {suite}: give one, or none")
    return dict(found)


def emit(found: Document, where: str | None) -> None:
    """Write a document to a file, or as the last line of stdout for `-`; None is nowhere."""
    if where == "-":
        print(to_json(found))
    elif where is not None:
        write_atomically(user_path(where), to_json(found, indent=2) + "\n")
