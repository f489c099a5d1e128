"""Compiled programs on disk, so that the next process on a machine need not compile again."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from pathlib import Path

# where TorchInductor and Triton look for what they built before, and our folder for it
VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def keep_programs() -> None:
    """Have Inductor and Triton keep what they build in the user's cache folder.

    Called before anything is built for a GPU. A folder that the user chose by one of the variables
    stays; where no folder can be written, torch and Triton do as they would.
    """
    # torch writes its own default, which a restart empties, into the variable when it is imported
    own = os.path.join(tempfile.gettempdir(), "torchinductor_")
    unset = {
        name: part
        for name, part in VARIABLES.items()
        if not os.environ.get(name) or os.environ[name].startswith(own)
    }
    folder = user_folder() if unset else None
    if folder is not None:
        os.environ.update({name: str(folder / part) for name, part in unset.items()})


def count_programs() -> int:
    """How many programs torch.compile has made of functions in this process."""
    # not imported for this: that takes a second, and who compiles has done it
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def user_folder() -> Path | None:
    """The first of the user's folders that can be written: ~/.cache/tachyscope, else in /tmp."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    places = [Path(cache, "tachyscope"), Path(tempfile.gettempdir(), f"tachyscope-{user}")]
    return next((place for place in places if place.is_absolute() and _is_ours(place)), None)


def _is_ours(folder: Path) -> bool:
    """Whether we can write there and nobody else can: what lies there is run."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError:
        return False
    shared = stat.S_IWGRP | stat.S_IWOTH
    mine = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    return mine and stat.S_ISDIR(status.st_mode) and not status.st_mode & shared
