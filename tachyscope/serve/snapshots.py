"""Sessions on disk: what a client that was cut off, or a server that was killed, goes on from.

A folder for every session: `session.json`, and a safetensors file for each of its last snapshots.
A file is written under another name and then renamed, `session.json` last: what it lists is whole.
The place is a path or an fsspec URL.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import fsspec
import safetensors.torch
import torch
from torch import Tensor

from tachyscope.errors import TachyscopeError

VERSION = 1
DTYPES = {  # by the names of safetensors
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16",
    torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
STAGING = 2**25  # bytes that leave a GPU at once
KEPT = 4  # snapshots of a session that one can go back to
NAME = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class Saved:
    """A session as its file tells it."""

    secret: str  # its hash
    log: dict[str, Any]
    generation: int
    files: tuple[tuple[int, str], ...]  # of its snapshots, oldest first, and after how many chunks


def hash_secret(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


class Snapshots:
    """The sessions of one folder."""

    def __init__(self, place: str) -> None:
        self.fs, self.root = fsspec.core.url_to_fs(place)
        self.fs.makedirs(self.root, exist_ok=True)

    def save(
        self, name: str, saved: Saved, chunk: int, state: dict[str, Tensor]
    ) -> tuple[tuple[tuple[int, str], ...], int]:
        """Add a snapshot to a session, drop those that are too old; the files, and its bytes.

        The state's tensors are let go of one by one.
        """
        folder, file = self._folder(name), f"{saved.generation}-{chunk}.safetensors"
        self.fs.makedirs(folder, exist_ok=True)
        size = self._write(f"{folder}/{file}", pack(state))
        files = (*(one for one in saved.files if one[0] < chunk), (chunk, file))[-KEPT:]
        text = {
            "version": VERSION,
            "secret": saved.secret,
            "generation": saved.generation,
            "files": files,
            "saved": time.time(),
            "log": saved.log,
        }
        self._write(f"{folder}/session.json", [json.dumps(text).encode()])
        listed = {name for _, name in files} | {"session.json"}
        for path in self.fs.ls(folder, detail=False):
            if path.rsplit("/", 1)[-1] not in listed:
                self.fs.rm_file(path)
        return files, size

    def find(self, name: str, secret: str) -> Saved:
        """A session that was saved; raises where there is none, or the secret is another."""
        gone = "no session of this name and secret is kept here: open a new one"
        try:
            value = json.loads(self.fs.cat_file(f"{self._folder(name)}/session.json"))
            files = tuple((int(chunk), str(file)) for chunk, file in value["files"])
            saved = Saved(value["secret"], value["log"], value["generation"], files)
        except (OSError, ValueError, KeyError, TypeError):
            raise TachyscopeError(gone) from None
        if value["version"] != VERSION or not hmac.compare_digest(
            saved.secret, hash_secret(secret)
        ):
            raise TachyscopeError(gone)
        return saved

    def has(self, name: str) -> bool:
        """Whether a session of this name was saved."""
        return bool(NAME.fullmatch(name)) and bool(
            self.fs.exists(f"{self.root}/{name}/session.json")
        )

    def load(self, name: str, file: str) -> dict[str, Tensor]:
        """A snapshot's tensors."""
        return safetensors.torch.load(self.fs.cat_file(f"{self._folder(name)}/{file}"))

    def remove(self, name: str) -> None:
        folder = self._folder(name)
        if self.fs.exists(folder):
            self.fs.rm(folder, recursive=True)

    def sweep(self, kept_s: float) -> None:
        """Remove sessions that were saved longer ago than that."""
        for folder in self.fs.ls(self.root, detail=False):
            name = folder.rsplit("/", 1)[-1]
            try:
                saved = json.loads(self.fs.cat_file(f"{folder}/session.json"))["saved"]
            except (OSError, ValueError, KeyError):
                saved = 0.0
            if NAME.fullmatch(name) and saved < time.time() - kept_s:
                self.fs.rm(folder, recursive=True)

    def _folder(self, name: str) -> str:
        if not NAME.fullmatch(name):
            raise TachyscopeError("a session's name is 16 hexadecimal digits")
        return f"{self.root}/{name}"

    def _write(self, path: str, parts: Iterable[bytes | memoryview]) -> int:
        """Write a file, piece by piece; its bytes."""
        part = f"{path}.part"
        try:
            size = 0
            with self.fs.open(part, "wb") as file:
                for piece in parts:
                    file.write(piece)
                    size += len(piece)
            self.fs.mv(part, path)
        except BaseException:
            if self.fs.exists(part):
                self.fs.rm_file(part)
            raise
        return size


def pack(state: dict[str, Tensor]) -> Iterator[bytes | memoryview]:
    """A safetensors file in pieces, each to be written before the next is asked for.

    One tensor after the other comes to the host and is let go. safetensors' own writer makes one
    piece of all, in which time no other thread of Python runs.
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
