"""Authors' own repositories on small random weights: `accelerate` in them, and worlds beside ours.

Each family runs in a process of its own, since their modules have the same names and expect CUDA.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tachyscope.core.errors import TachyscopeError

FAMILIES = (
    "self-forcing", "causvid", "reward-forcing", "longlive", "infinite-forcing", "rolling-forcing",
)  # fmt: skip
# presets of world models, run beside their authors' modules
WORLDS = (
    "abot-world", "lingbot-world", "lingbot-world-14b", "matrix-game-2", "matrix-game-2-drive",
    "matrix-game-2-run", "waypoint",
)  # fmt: skip
DENSE = 1e-5  # relative error that counts as equal, in float32


def run(family: str, source: Path) -> list[dict[str, Any]]:
    """One row a check of a family's code, from a clone of its repository."""
    if family not in FAMILIES + WORLDS:
        raise TachyscopeError(f"no family {family!r}: choose one of {', '.join(FAMILIES + WORLDS)}")
    if not source.is_dir():
        raise TachyscopeError(f"{source} is no folder: give a clone of the authors' repository")
    runs = "worlds" if family in WORLDS else "host"
    runs = family if family == "waypoint" else runs  # of no Wan
    ran = subprocess.run(
        [sys.executable, "-m", f"tachyscope_lab.plug.{runs}", family, str(source)],
        capture_output=True, text=True,
    )  # fmt: skip
    if ran.returncode:
        last = ran.stderr.strip().splitlines()[-1:] or ["no output"]
        raise TachyscopeError(f"{family} in {source} did not run: {last[0]}")
    rows: list[dict[str, Any]] = json.loads(ran.stdout.splitlines()[-1])
    return rows


def commit_of(source: Path) -> str:
    """The commit that a clone stands at, or an empty string."""
    ran = subprocess.run(
        ["git", "-C", str(source), "rev-parse", "HEAD"], capture_output=True, text=True
    )
    return ran.stdout.strip()
