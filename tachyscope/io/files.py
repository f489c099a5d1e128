"""Atomic file writes: under a temporary name, then renamed.

Only regular files are replaced. A symbolic link is followed, and stays. Fifos, character devices
and open descriptors (`/dev/stdout`, `/dev/fd/3`) are written to; anything else is refused.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tachyscope.core.errors import TachyscopeError

try:
    import fcntl
except ImportError:  # not on Windows: there no stale part is swept
    fcntl = None  # type: ignore[assignment]

PART = re.compile(r"\.[0-9a-f]{8}\.part")
LONGEST = 200  # bytes of a name that a part repeats; file systems allow 255 in all
LINKS = 40  # Linux follows no more
KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a fifo",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
}
STREAMS = (stat.S_IFIFO, stat.S_IFCHR)


def user_path(text: str, what: str = "a path") -> Path:
    """A path as typed by a user: `~` is expanded, and what cannot be a path is refused."""
    if not text:
        raise TachyscopeError(f"{what} must name a file or folder, got '': . is this folder")
    if "\0" in text:
        raise TachyscopeError(f"{what} has no NUL bytes, got {text!r}: leave them out")
    path = os.path.expanduser(text)
    if text.startswith("~") and path == text:
        user = text.split("/")[0]
        raise TachyscopeError(
            f"{what}: {user} is the home of a user that is not known here: give the whole path, or "
            f"./{user} for a folder of that name"
        )
    return Path(path)


def check_folder(path: str | os.PathLike[str]) -> Path:
    """The folder, created if missing; raises if no file can be created in it."""
    folder = Path(path)
    # permission bits are not enough (root, read-only mounts, quotas): create a file
    with _part(folder / "probe"):
        return folder


def check_file(path: str | os.PathLike[str]) -> None:
    """Raise if a file could not be written, before its content is computed."""
    target = Path(path)
    if is_stream(target):
        if not os.access(target, os.W_OK):
            raise unwritable(target, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
        if _kind(target) == stat.S_IFCHR:
            _write_nothing(target)
    else:
        check_folder(_regular(target).parent)


def _write_nothing(device: Path) -> None:
    """Raise if a device takes no data, like /dev/full."""
    try:
        file = os.open(device, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            os.write(file, b"")
        finally:
            os.close(file)
    except OSError as error:
        raise unwritable(device, error) from error


def is_stream(path: str | os.PathLike[str]) -> bool:
    """Whether the path is a fifo, a character device or an open descriptor."""
    return _kind(Path(path)) in STREAMS or _is_open_descriptor(os.fspath(path))


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary file beside `path`, renamed to it at the end, removed on any exception."""
    target = _regular(Path(path))
    with _part(target) as part:
        yield part
        try:
            if target.exists():
                part.chmod(stat.S_IMODE(target.stat().st_mode))
            part.replace(target)
        except OSError as error:
            raise unwritable(target, error) from error


def write_atomically(path: str | os.PathLike[str], content: bytes | str) -> Path:
    """Write a file, text as UTF-8; readers see the old content or the new, never a part.

    Fifos, devices and open descriptors are written to directly.
    """
    target = Path(path)
    data = content.encode() if isinstance(content, str) else content
    try:
        if is_stream(target):
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()  # the descriptor may be theirs
            with target.open("ab") as file:
                file.write(data)
        else:
            with replacing(target) as part:
                part.write_bytes(data)
    except BrokenPipeError:
        raise  # the reader closed the pipe, which is no fault
    except OSError as error:
        raise unwritable(target, error) from error
    return target


def unwritable(path: Path, error: OSError) -> TachyscopeError:
    """The error for a path that cannot be written."""
    reason = (error.strerror or str(error)).lower()
    return TachyscopeError(f"{path} cannot be written ({reason}): choose another place")


def _regular(path: Path) -> Path:
    """The path with links followed, which must be a regular file or not exist."""
    kind = _kind(path)
    if kind == stat.S_IFDIR:
        raise TachyscopeError(f"{path} is a folder: give the name of a file")
    if kind not in (None, stat.S_IFREG) or _is_open_descriptor(os.fspath(path)):
        what = KINDS.get(kind or 0, "no regular file")
        raise TachyscopeError(f"{path} is {what}, which is not replaced: give another name")
    if kind and not os.access(path, os.W_OK):
        raise unwritable(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _kind(path: Path) -> int | None:
    """The file type at the path, as stat's S_IF…; None if nothing is there."""
    try:
        return stat.S_IFMT(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        raise TachyscopeError(f"a path has no NUL bytes, got {os.fspath(path)!r}") from None
    except OSError as error:
        raise unwritable(path, error) from error


def _is_open_descriptor(path: str) -> bool:
    """Whether the path links to a descriptor of a process, as /dev/stdout does."""
    for _ in range(LINKS):
        if not os.path.islink(path):
            return False
        folder = os.path.dirname(path)
        if re.fullmatch(r"/proc/(\d+|self)(/task/\d+)?/fd", os.path.realpath(folder)):
            return True
        path = os.path.join(folder, os.readlink(path))
    return False


@contextmanager
def _part(target: Path) -> Iterator[Path]:
    """A new empty file beside `target`, whose folder is created if missing; removed at the end.

    It is locked meanwhile, so that other processes do not take it for a leftover of a dead one.
    """
    folder, name = target.parent, _part_name(target)
    part, file = folder / f"{name}.{uuid.uuid4().hex[:8]}.part", None
    # a signal may come at any time, so the name is known before the file exists
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _sweep(folder, name)
            file = _create(part)
        except (FileExistsError, NotADirectoryError) as error:
            raise _no_folder(folder, error) from error
        except ValueError:
            raise TachyscopeError(f"a path has no NUL bytes, got {os.fspath(folder)!r}") from None
        except OSError as error:
            raise unwritable(folder, error) from error
        yield part
    finally:
        with suppress(OSError, ValueError):
            part.unlink()
        if file is not None:
            os.close(file)


def _part_name(target: Path) -> str:
    """The prefix of the names of a target's temporary files."""
    name = target.name
    if len(os.fsencode(name)) > LONGEST:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
    return f".{name}"


def _create(part: Path) -> int | None:
    """Create and lock a file; returns the descriptor that holds the lock."""
    while True:
        # not tempfile, whose files are readable by their owner only, also after the rename
        file = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        if fcntl is None:  # Windows, which cannot rename an open file either
            os.close(file)
            return None
        _lock(file, wait=True)
        # another process may have swept it before it was locked
        if os.fstat(file).st_nlink:
            return file
        os.close(file)


def _sweep(folder: Path, name: str) -> None:
    """Remove temporary files of this name that no living process has locked."""
    if fcntl is None:
        return
    names: list[str] = []
    with suppress(PermissionError):  # a folder may be written to and not listed
        names = os.listdir(folder)
    for entry in names:
        if not entry.startswith(name) or not PART.fullmatch(entry[len(name) :]):
            continue
        with suppress(OSError):  # another user's, or swept by another process meanwhile
            file = os.open(folder / entry, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if stat.S_ISREG(os.fstat(file).st_mode) and _lock(file, wait=False):
                    (folder / entry).unlink()
            finally:
                os.close(file)


def _lock(file: int, wait: bool) -> bool:
    """Lock a file; False if another process holds it, or the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _no_folder(folder: Path, error: OSError) -> TachyscopeError:
    """The error for a folder whose path has a file in it."""
    for path in (folder, *folder.parents):
        kind = _kind(path)
        if kind not in (None, stat.S_IFDIR):
            what = KINDS.get(kind or 0, "something else")
            return TachyscopeError(f"{path} is {what}, not a folder: give the name of a folder")
    return unwritable(folder, error)
