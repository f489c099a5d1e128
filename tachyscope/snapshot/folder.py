"""Snapshots of a stream in a folder: its state, and a bank's blocks in segments."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.stream import Stream
from tachyscope.io.files import check_folder, write_atomically
from tachyscope.models.checkpoint import read_json, read_tensors, write_tensors
from tachyscope.store import KVStore

MANIFEST = "manifest.json"
VERSION = 1
PIECE = 2**24  # bytes hashed at once


class Snapshots:
    """The newest snapshot of one stream: `save` it every few chunks, `load` it in a new process.

    The folder has a file with the state and, if the cache is a bank, segments with the blocks that
    were written since the segment before. The manifest lists them with sizes and hashes, and is
    replaced last: a killed process leaves the previous snapshot intact.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._layers: list[KVStore] | None = None  # whose blocks the segments have
        self._manifest: dict[str, Any] = {"generation": 0, "segments": []}

    def save(self, stream: Stream) -> int:
        """Write what is new since the last snapshot; returns the bytes written."""
        # exclusively, so that state and blocks are of the same chunk
        return stream.alone(lambda: self._save(stream))

    def _save(self, stream: Stream) -> int:
        state = stream.state(host=False)
        layers = stream.session.memory.layers
        check_folder(self.folder)
        generation, segments = self._manifest["generation"], self._manifest["segments"]
        if self._layers is not layers:  # another video, or a restarted one: its blocks are new
            generation, segments = self._last_generation() + 1, []
        known = segments[-1]["sealed"] if segments else 0
        written = 0
        if (bank := layers[0].bank) is not None and (sealed := int(bank.tensors["sealed"])) > known:
            part = self._write(f"segment-{generation}-{sealed}", _segment(layers, known))
            segments = [*segments, part | {"sealed": sealed}]
            written += part["bytes"]
        held = self._write(f"state-{generation}-{stream.session.memory.chunk}", state)
        self._manifest = {
            "version": VERSION, "generation": generation, "state": held, "segments": segments,
        }  # fmt: skip
        write_atomically(self.folder / MANIFEST, json.dumps(self._manifest, indent=1))
        self._layers = layers
        self._sweep()
        return written + int(held["bytes"])

    def load(self, stream: Stream) -> None:
        """Restore a stream of the same model, plan and prompt from the newest snapshot."""
        manifest = self._read_manifest()
        state = self._read(manifest["state"])
        segments = [self._read(part) for part in manifest["segments"]]
        banked = stream.session.memory.layers[0].bank is not None
        stream.restore(state, segments if banked else None)
        self._manifest, self._layers = manifest, stream.session.memory.layers

    def _last_generation(self) -> int:
        if not (self.folder / MANIFEST).is_file():
            return 0
        return int(self._read_manifest()["generation"])

    def _read_manifest(self) -> dict[str, Any]:
        path = self.folder / MANIFEST
        manifest = read_json(path)
        parts = manifest.get("segments")
        whole = (
            manifest.get("version") == VERSION
            and type(manifest.get("generation")) is int
            and isinstance(parts, list)
            and all(map(_is_part, (manifest.get("state"), *parts)))
            and all(type(part.get("sealed")) is int for part in parts)
        )
        if not whole:
            raise TachyscopeError(
                f"{path} is no manifest of version {VERSION}: give a folder that Snapshots wrote"
            )
        return manifest

    def _write(self, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        path = self.folder / f"{name}.safetensors"
        write_tensors(path, tensors)
        return {"name": path.name, "bytes": path.stat().st_size, "hash": _hash(path)}

    def _read(self, part: Mapping[str, Any]) -> dict[str, Tensor]:
        path = self.folder / part["name"]
        size = path.stat().st_size if path.is_file() else 0
        if size != part["bytes"]:
            raise TachyscopeError(
                f"{path} has {size} bytes and must have {part['bytes']}: it was cut short, and "
                f"this snapshot cannot be read: get the file again, or start a new video"
            )
        if _hash(path) != part.get("hash"):
            raise TachyscopeError(
                f"{path} is not as it was written: get the file again, or start a new video"
            )
        return read_tensors(path)

    def _sweep(self) -> None:
        """Remove files that the manifest does not list."""
        parts = [self._manifest["state"], *self._manifest["segments"]]
        named = {part["name"] for part in parts}
        for kind in ("state", "segment"):
            for path in self.folder.glob(f"{kind}-*.safetensors"):
                if path.name not in named:
                    path.unlink(missing_ok=True)


def _is_part(part: Any) -> bool:
    """Whether a manifest's entry names a file of the folder and has its size."""
    return (
        isinstance(part, dict)
        and isinstance(name := part.get("name"), str)
        and name.endswith(".safetensors")
        and Path(name).name == name
        and type(part.get("bytes")) is int
    )


def _segment(layers: list[KVStore], since: int) -> dict[str, Tensor]:
    return dict(_blocks(layers, since))


def _blocks(layers: list[KVStore], since: int) -> Iterator[tuple[str, Tensor]]:
    for i, layer in enumerate(layers):
        assert layer.bank is not None
        for name, x in layer.bank.segment(since).items():
            yield f"layers.{i}.{name}", x


def _hash(path: Path) -> str:
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            hasher.update(piece)
    return hasher.hexdigest()
