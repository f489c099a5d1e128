"""Files that are whole or absent: written under another name, then renamed."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tachyscope.errors import TachyscopeError


def check_folder(path: str | os.PathLike[str]) -> Path:
    """The folder, made if it was missing, after a file could be created in it."""
    folder = Path(path)
    # permission bits say little (root, read-only mounts, quotas): only a file proves it
    probe = _part(folder / "probe")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise unwritable(folder, error) from error
    return folder


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary name beside `path`, renamed to it at the end and removed on any exception."""
    target = Path(path)
    if target.is_dir():
        raise TachyscopeError(f"{target} is a folder: give the name of a file")
    part = _part(check_folder(target.parent) / target.name)
    try:
        yield part
        try:
            part.replace(target)
        except OSError as error:
            raise unwritable(target, error) from error
    finally:
        part.unlink(missing_ok=True)


def write_atomically(path: str | os.PathLike[str], content: bytes | str) -> Path:
    """Write a whole file, text as UTF-8; a reader sees the old content or the new, never a part."""
    target = Path(path)
    with replacing(target) as part:
        try:
            part.write_bytes(content.encode() if isinstance(content, str) else content)
        except OSError as error:
            raise unwritable(target, error) from error
    return target


def unwritable(path: Path, error: OSError) -> TachyscopeError:
    """The error for a place that cannot be written, in one line."""
    reason = (error.strerror or str(error)).lower()
    return TachyscopeError(f"{path} cannot be written ({reason}): choose another folder")


def _part(target: Path) -> Path:
    # not tempfile: its files are private to their owner, and stay so after the rename
    return target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.part")
