"""Our own trained models, shipped in the package and checked by hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from pathlib import Path

from tachyscope.core.errors import TachyscopeError

HERE = Path(__file__).parent
RECORD = HERE / "hashes.json"  # model -> file -> sha256


def shipped(name: str) -> Path:
    """The folder of a shipped model, every file of it as it was recorded."""
    folder = HERE / name
    for file, want in json.loads(RECORD.read_text())[name].items():
        if not (folder / file).is_file() or digest(folder / file) != want:
            raise TachyscopeError(
                f"{folder / file} is missing or not the file that was shipped: "
                f"install the package again"
            )
    return folder


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_hashes(names: Collection[str]) -> dict[str, str]:
    """One hash for all files of each shipped model among `names`, by name."""
    record = json.loads(RECORD.read_text())
    return {
        name: hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
        for name, files in record.items()
        if name in names
    }
