"""Others' code on small random weights: `accelerate` in it, and world models beside ours.

Each family runs in a process of its own, since authors' modules have the same names and expect
CUDA.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from tachyscope.core.errors import TachyscopeError

FAMILIES = (
    "self-forcing", "causvid", "reward-forcing", "longlive", "infinite-forcing", "rolling-forcing",
    "krea",
)  # fmt: skip
# presets of world models, run beside their authors' modules
WORLDS = (
    "abot-world", "lingbot-world", "lingbot-world-14b", "matrix-game-2", "matrix-game-2-drive",
    "matrix-game-2-run", "waypoint",
)  # fmt: skip
PACKAGES = ("diffusers",)  # run as installed
NAMES = FAMILIES + WORLDS + PACKAGES
# families with a module of their own
MODULES = {"krea": "krea", "waypoint": "waypoint"} | {name: name for name in PACKAGES}


def run(family: str, source: Path | None) -> list[dict[str, Any]]:
    """One row a check of a family's code, from a clone of its repository or as it is installed."""
    if family not in NAMES:
        raise TachyscopeError(f"no family {family!r}: choose one of {', '.join(NAMES)}")
    if family in PACKAGES:
        if source is not None:
            raise TachyscopeError(f"{family} runs as it is installed: leave --source out")
        whose, where = {"version": metadata.version(family)}, []
    elif source is None or not source.is_dir():
        raise TachyscopeError(f"{source} is no folder: give a clone of the authors' repository")
    else:
        whose, where = {"commit": commit_of(source)}, [family, str(source)]
    module = MODULES.get(family, "worlds" if family in WORLDS else "host")
    ran = subprocess.run(
        [sys.executable, "-m", f"tachyscope_lab.plug.{module}", *where],
        capture_output=True, text=True,
    )  # fmt: skip
    if ran.returncode:
        last = ran.stderr.strip().splitlines()[-1:] or ["no output"]
        raise TachyscopeError(f"{' in '.join(where) or family} did not run: {last[0]}")
    rows = json.loads(ran.stdout.splitlines()[-1])
    return [{"family": family} | whose | row for row in rows]


def commit_of(source: Path) -> str:
    """The commit that a clone stands at, or an empty string."""
    ran = subprocess.run(
        ["git", "-C", str(source), "rev-parse", "HEAD"], capture_output=True, text=True
    )
    return ran.stdout.strip()
