"""Keeps compiled kernels on disk, so that the next process need not compile them again."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from pathlib import Path

# the cache folders of TorchInductor and Triton, and our folder for each
VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def keep_programs() -> None:
    """Have Inductor and Triton cache what they build in the user's cache folder.

    Called before anything is built for a GPU. A folder that the user set stays; if no folder can be
    written, torch's and Triton's defaults stay.
    """
    # on import torch sets the variable to its default in /tmp, which a reboot empties
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
    """How many graphs torch.compile has made in this process."""
    # not imported here, which takes a second: after a compilation it is there
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def user_folder() -> Path | None:
    """The first folder that is writable: ~/.cache/tachyscope, or one in /tmp; else None."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    places = [Path(cache, "tachyscope"), Path(tempfile.gettempdir(), f"tachyscope-{user}")]
    return next((place for place in places if place.is_absolute() and _is_ours(place)), None)


def _is_ours(folder: Path) -> bool:
    """Whether only this user can write there: the files are code that will run."""
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
