"""A results document: what was measured or estimated, when, on what, by which command; as JSON."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from tachyscope_fpga.errors import TachyscopeError

Row = dict[str, Any]


def document(suite: str, rows: Sequence[Row], command: str, **more: Any) -> Row:
    """The rows with what they were measured on; without names of hosts."""
    head: Row = {
        "schema": 1,
        "suite": suite,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": {"cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "gpu": None},
        "versions": _versions(),
        "command": command,
    }
    return head | more | {"rows": list(rows)}


def emit(results: Row, where: str | None) -> None:
    """Write a document to a file, or as the last line of stdout for `-`; None is nowhere."""
    if where == "-":
        print(json.dumps(results, separators=(",", ":"), allow_nan=False))
    elif where is not None:
        write(Path(where), json.dumps(results, indent=2, allow_nan=False) + "\n")


def check_writable(where: str | None) -> None:
    """Raise where a document could not be written, before it is measured."""
    if where is not None and where != "-":
        path = Path(where)
        if path.is_dir():
            raise TachyscopeError(f"{path} is a folder: give the name of a file")
        check_folder(path.parent)


def check_folder(folder: Path) -> Path:
    """The folder, made if it was missing, after a file could be created in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, ValueError) as error:
        raise _unwritable(folder, error) from error


def write(path: Path, content: str | bytes) -> None:
    """A whole file or none: under a temporary name, then renamed."""
    part = None
    try:
        with tempfile.NamedTemporaryFile(
            "wb", dir=check_folder(path.parent), prefix=f".{path.name[:99]}.", delete=False
        ) as file:
            part = Path(file.name)
            file.write(content.encode() if isinstance(content, str) else content)
        mask = os.umask(0)
        os.umask(mask)
        part.chmod(0o666 & ~mask)  # a temporary file is private to its owner
        part.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        if part is not None:
            part.unlink(missing_ok=True)


def _unwritable(path: Path, error: Exception) -> TachyscopeError:
    reason = str(getattr(error, "strerror", None) or error).lower()
    return TachyscopeError(f"{path} cannot be written ({reason}): choose another place")


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text(errors="replace").splitlines() if info.exists() else ():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return " ".join(value.split())
    return platform.processor() or platform.machine() or "unknown"


def _versions() -> dict[str, str]:
    names = ("tachyscope-fpga", "amaranth", "numpy")
    found = {each.name: each.version for each in metadata.distributions(name=None) if each.name}
    return {"python": platform.python_version()} | {n: found[n] for n in names if n in found}
