"""Sessions on disk, from which a client that was cut off or a killed server resumes.

A folder for every session: `session.json`, and a safetensors file for each of its last snapshots.
A file is written under another name, synced and then renamed, `session.json` last: what it lists is
whole, but where a disk or a hand has changed it since. A snapshot's name has its checksum, and
`session.json` has its own. The place is a path or an fsspec URL.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import struct
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import fsspec
import safetensors.torch
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from tachyscope.core.errors import TachyscopeError, shown

VERSION = 2
DTYPES = {  # by the names of safetensors
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16",
    torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
STAGING = 2**25  # bytes that leave a GPU at once
KEPT = 4  # snapshots of a session that one can go back to
NAME = re.compile(r"[0-9a-f]{16}")
FILE = re.compile(r"\d{1,10}-\d{1,10}-([0-9a-f]{32})\.safetensors")  # generation, chunk, checksum
SAVED = re.compile(rb'^\{"version": \d+, "saved": (\d+\.?\d*),')
Pieces = Iterable[bytes | memoryview]


@dataclass(frozen=True)
class Saved:
    """The contents of a session's file."""

    secret: str  # its hash
    log: dict[str, Any]
    generation: int
    files: tuple[tuple[int, str], ...]  # of its snapshots, oldest first, and after how many chunks


def listed(fs: Any, folder: str) -> list[str]:
    """The paths in a folder; empty if there is none, as object stores have no empty folders."""
    try:
        return list(fs.ls(folder, detail=False))
    except FileNotFoundError:
        return []


def hash_secret(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


class Snapshots:
    """The sessions of one folder."""

    def __init__(self, place: str) -> None:
        # no cache of listings: other replicas write to the same store
        self.fs, self.root = fsspec.core.url_to_fs(place, use_listings_cache=False)
        self.fs.makedirs(self.root, exist_ok=True)
        self._unread: dict[str, float] = {}  # folders without a session's file, and since when

    def check_writable(self) -> None:
        """Raise OSError if the folder is not writable."""
        path = f"{self.root}/{secrets.token_hex(8)}.part"
        self.fs.pipe_file(path, b"-")
        self.fs.rm_file(path)

    def save(
        self, name: str, saved: Saved, chunk: int, state: dict[str, Tensor]
    ) -> tuple[tuple[tuple[int, str], ...], int]:
        """Add a snapshot to a session and remove old ones; returns its files and bytes written.

        The tensors of `state` are removed from it and freed one by one.
        """
        folder, part = self._folder(name), f"{saved.generation}-{chunk}"
        if not self.fs.exists(folder):
            self.fs.makedirs(folder, exist_ok=True)
            self._sync_folder(self.root)
        size, file = self._write(folder, part, f"{part}-{{}}.safetensors", pack(state))
        files = (*(one for one in saved.files if one[0] < chunk), (chunk, file))[-KEPT:]
        value = {
            "version": VERSION,
            "saved": time.time(),
            "secret": saved.secret,
            "generation": saved.generation,
            "files": files,
            "log": saved.log,
        }
        text = json.dumps(value | {"checksum": _checksum([_canonical(value)])})
        self._write(folder, "session", "session.json", [text.encode()])
        listed = {name for _, name in files} | {"session.json"}
        for path in self.fs.ls(folder, detail=False):
            if path.rsplit("/", 1)[-1] not in listed:
                self.fs.rm_file(path)
        return files, size

    def find(self, name: str, secret: str) -> Saved:
        """Read a saved session; raises if there is none or the secret is wrong."""
        gone = "no session of this name and secret is kept here: open a new one"
        try:
            value = self._read(f"{self._folder(name)}/session.json")
            files = tuple((int(chunk), str(file)) for chunk, file in value["files"])
            saved = Saved(value["secret"], value["log"], value["generation"], files)
        except (OSError, ValueError, KeyError, TypeError):
            raise TachyscopeError(gone) from None
        if (
            not files
            or value.get("version") != VERSION
            or not hmac.compare_digest(saved.secret, hash_secret(secret))
        ):
            raise TachyscopeError(gone)
        return saved

    def has(self, name: str) -> bool:
        """Whether a session of this name was saved."""
        return bool(NAME.fullmatch(name)) and bool(
            self.fs.exists(f"{self.root}/{name}/session.json")
        )

    def load(self, name: str, file: str) -> dict[str, Tensor]:
        """Load a snapshot's tensors; raises if its checksum does not match."""
        known = FILE.fullmatch(file)
        try:
            data = self.fs.cat_file(f"{self._folder(name)}/{file}") if known else b""
        except OSError:
            data = b""
        if known is None or _checksum([data]) != known[1]:
            raise TachyscopeError(
                f"snapshot {shown(file)} is missing or damaged: go back to an older one"
            )
        return safetensors.torch.load(data)

    def remove(self, name: str) -> None:
        folder = self._folder(name)
        if self.fs.exists(folder):
            self.fs.rm(folder, recursive=True)

    def sweep(self, kept_s: float, most: int, opened: Collection[str] = ()) -> None:
        """Remove sessions saved more than `kept_s` ago, and the oldest beyond `most`.

        Those in `opened` stay, whatever their age.
        """
        now, saved, unread = time.time(), {}, {}
        for folder in listed(self.fs, self.root):
            name = folder.rsplit("/", 1)[-1]
            if not NAME.fullmatch(name) or name in opened:
                continue
            try:
                begin = self.fs.cat_file(f"{folder}/session.json", start=0, end=100)
            except OSError:
                begin = b""
            if found := SAVED.search(begin):
                saved[folder] = float(found[1])
            else:  # one that is written for the first time, by another replica, or a torn one
                saved[folder] = unread[folder] = self._unread.get(folder, now)
        self._unread = unread
        newest = sorted(saved, key=lambda folder: -saved[folder])
        for i, folder in enumerate(newest):
            if i >= most - len(opened) or saved[folder] < now - kept_s:
                self.fs.rm(folder, recursive=True)

    def _folder(self, name: str) -> str:
        if not NAME.fullmatch(name):
            raise TachyscopeError("a session's name is 16 hexadecimal digits")
        return f"{self.root}/{name}"

    def _read(self, path: str) -> dict[str, Any]:
        """Read a session's file; raises ValueError if its checksum does not match."""
        value = json.loads(self.fs.cat_file(path))
        if not isinstance(value, dict) or value.pop("checksum", "") != _checksum(
            [_canonical(value)]
        ):
            raise ValueError(path)
        return value

    def _write(self, folder: str, part: str, name: str, pieces: Pieces) -> tuple[int, str]:
        """Write a file in pieces; returns its size, and its name with the checksum for `{}`."""
        path, checksum, size = f"{folder}/{part}.part", _hash(), 0
        try:
            with self.fs.open(path, "wb") as file:
                for piece in pieces:
                    file.write(piece)
                    checksum.update(piece)
                    size += len(piece)
                self._sync(file)
            name = name.format(checksum.hexdigest())
            self.fs.mv(path, f"{folder}/{name}")
            self._sync_folder(folder)
        except BaseException:
            if self.fs.exists(path):
                self.fs.rm_file(path)
            raise
        return size, name

    def _sync(self, file: Any) -> None:
        """fsync a file before it is renamed, against power cuts."""
        if isinstance(self.fs, LocalFileSystem):
            file.flush()
            os.fsync(file.fileno())

    def _sync_folder(self, folder: str) -> None:
        if isinstance(self.fs, LocalFileSystem) and hasattr(os, "O_DIRECTORY"):
            opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(opened)
            finally:
                os.close(opened)


def _hash() -> Any:
    return hashlib.blake2b(digest_size=16)


def _checksum(pieces: Pieces) -> str:
    checksum = _hash()
    for piece in pieces:
        checksum.update(piece)
    return str(checksum.hexdigest())


def _canonical(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def pack(state: dict[str, Tensor]) -> Iterator[bytes | memoryview]:
    """A safetensors file in pieces; each must be written before the next is taken.

    Tensors come to the host and are freed one by one. safetensors' own writer makes one piece of
    all and holds the GIL meanwhile.
    """
    names = sorted(state, key=lambda name: (-state[name].itemsize, name))  # each begins aligned
    header, end = {}, 0
    for name in names:
        x, begin = state[name], end
        end += x.nbytes
        kind = {"dtype": DTYPES[x.dtype], "shape": list(x.shape)}
        header[name] = kind | {"data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    staging: Tensor | None = None
    for name in names:
        flat = state.pop(name).contiguous().flatten().view(torch.uint8)
        if not flat.is_cuda:
            yield flat.numpy().data
            continue
        # page-locked memory that is used again and again: the driver takes what is copied to any
        # other in small steps, and launches of the sessions' chunks wait for it meanwhile
        if staging is None:
            staging = torch.empty(STAGING, dtype=torch.uint8, pin_memory=True)
        for piece in flat.split(STAGING):
            host = staging[: len(piece)]
            host.copy_(piece, non_blocking=True)
            torch.cuda.current_stream(piece.device).synchronize()
            yield host.numpy().data
