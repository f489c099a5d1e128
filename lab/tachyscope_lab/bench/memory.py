"""What `generate` takes of RAM on a CPU beside what its first line promised, and a cap at that.

From the line on the process is held to what it promised: by a memory group (cgroup) of its own
where one can be made, else by a limit on its address space.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch

from tachyscope.core.errors import TachyscopeError
from tachyscope.io.results import Document, document
from tachyscope.io.tables import Column, table
from tachyscope.models.wan.config import WanConfig
from tachyscope.models.wan.loading import save_wan
from tachyscope.models.wan.random import random_wan
from tachyscope_lab.bench.stand_ins import random_vae

GROUPS = (  # where memory groups are, and the files of their limits: cgroup v2's, and v1's
    (Path("/sys/fs/cgroup"), "memory.max"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
)
# of address space, which threads and libraries reserve and do not use
RESERVED = 2**30
PROMISE = re.compile(r"predicted peak ([0-9.]+) GB of RAM")


class Setting(NamedTuple):
    """A run: the words of `generate`, and the model that it needs where that is not shipped."""

    name: str
    words: str
    config: WanConfig | None = None
    vae: bool = False  # Wan's own, of random weights


def wan(width: int, layers: int, size: tuple[int, int]) -> WanConfig:
    """Wan's shape cut small: heads of 128 channels, one pass and a clean one."""
    return WanConfig(
        dim=width, ffn_dim=width * 35 // 6, layers=layers, heads=width // 128, size=size,
        steps=(1000,),
    )  # fmt: skip


TINY = "--weights decoder=random-tiny"
NARROW, MIDDLE, WIDE = wan(384, 4, (16, 24)), wan(768, 4, (12, 20)), wan(1536, 2, (8, 12))
SHORT = "cache=bank:resident=9f"  # full after three chunks
SETTINGS = (
    Setting("toy-chunks, fast", "toy-chunks --frames 66"),
    Setting("atrium-world, fast", "atrium-world --world 3 --frames 24"),
    Setting("atrium-world, dense", "atrium-world --world 3 --frames 40 --plan dense"),
    Setting("atrium-world, pose", "atrium-world --world 3 --frames 24 --plan pose"),
    Setting("atrium-tokens, lossless", "atrium-tokens --world 3 --frames 4 --plan lossless"),
    Setting("Wan 384 wide, dense", f"--frames 45 --plan dense {TINY}", NARROW),
    Setting("Wan 384 wide, fast", f"--frames 45 {TINY} --plan 'fast {SHORT}'", NARROW),
    Setting("Wan 384 wide, its VAE", "--frames 9 --plan dense", NARROW, vae=True),
    Setting("Wan 768 wide, dense", f"--frames 45 --plan dense {TINY}", MIDDLE),
    Setting("Wan 768 wide, int4", f"--frames 45 {TINY} --plan 'fast {SHORT},host=int4'", MIDDLE),
    Setting("Wan 1536 wide, dense", f"--frames 45 --plan dense {TINY}", WIDE),
    Setting("Wan 1536 wide, fast", f"--frames 45 {TINY} --plan 'fast {SHORT}'", WIDE),
)


def bench_memory(
    names: Sequence[str] = (), command: str = "", watch: Callable[[str], None] | None = None
) -> Document:
    """Every setting, or those that a name is of; a results document."""
    chosen = [one for one in SETTINGS if not names or any(name in one.name for name in names)]
    if not chosen:
        raise TachyscopeError(
            f"no setting {', '.join(names)}; there are: {'; '.join(one.name for one in SETTINGS)}"
        )
    rows = []
    for setting in chosen:
        rows.append(held(setting))
        if watch is not None:
            watch(line(rows[-1]))
    return document("memory", rows, command)


def held(setting: Setting) -> Document:
    """One setting in a process of its own: promised, taken, and what held it."""
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name), []
        if setting.config is not None:
            model = ["wan_causal", "--weights", str(folder / "model")]
            _write(setting, folder / "model")
        out, told = folder / "out", folder / "stderr"
        words = ["generate", *model, *shlex.split(setting.words), "--out", str(out)]
        begun = time.monotonic()
        with (
            told.open("w") as faults,
            _group() as group,
            subprocess.Popen(
                [*_within(group), sys.executable, "-u", "-m", "tachyscope", *words],
                stdout=subprocess.PIPE, stderr=faults, text=True,
            ) as run,
        ):  # fmt: skip
            try:
                assert run.stdout is not None
                promise = PROMISE.search(run.stdout.readline())
                by = _hold(run.pid, promise, group)
                run.stdout.read()
                code = run.wait()
            finally:
                run.kill()
        row: Document = {"name": setting.name, "held_by": by, "seconds": time.monotonic() - begun}
        if code or promise is None:
            last = told.read_text().strip().splitlines()[-1:]
            return row | {"ended": f"{code}: {' '.join(last)}"}
        (made,) = json.loads((out / "generate.json").read_text())["rows"]
        taken, promised = made["ram_gb"], made["promised_ram_gb"]
        return row | {
            "ended": "well", "plan": made["plan"], "frames": made["frames"], "taken_gb": taken,
            "promised_gb": promised, "error": promised / taken - 1,
        }  # fmt: skip


def _write(setting: Setting, folder: Path) -> None:
    assert setting.config is not None
    model = random_wan(setting.config)
    if setting.vae:
        model.decoder = random_vae(16, torch.float32)
    save_wan(model, folder)


@contextmanager
def _group() -> Iterator[tuple[Path, str] | None]:
    """A memory group of its own and the file of its limit; None where none can be made."""
    for root, limit in GROUPS:
        path = root / f"tachyscope-{os.getpid()}"
        with suppress(OSError):
            path.mkdir()
            try:
                if os.access(path / limit, os.W_OK):
                    yield path, limit
                    return
            finally:
                with suppress(OSError):  # its process is gone by now
                    path.rmdir()
    yield None


def _within(group: tuple[Path, str] | None) -> list[str]:
    """What begins a command in a group: pages count for the group that a process is then in."""
    if group is None:
        return []
    return ["sh", "-c", f'echo $$ > "{group[0]}/cgroup.procs" && exec "$@"', "sh"]


def _hold(pid: int, promise: re.Match[str] | None, group: tuple[Path, str] | None) -> str:
    """Hold a process to its promise, which it has just told; by what."""
    if promise is None:
        return "nothing"
    most = int(1e9 * float(promise[1])) + 5_000_000  # it was rounded
    if group is not None:
        path, limit = group
        (path / limit).write_text(str(most))
        return "memory group"
    sizes = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    space, there = (1024 * int(sizes[name].split()[0]) for name in ("VmSize", "VmRSS"))
    cap = space + max(0, most - there) + RESERVED
    resource.prlimit(pid, resource.RLIMIT_AS, (cap, cap))
    return "address space"


def line(row: Document) -> str:
    """A setting in one line."""
    if row["ended"] != "well":
        return f"{row['name']}: ended {row['ended']}, held by {row['held_by']}"
    return (
        f"{row['name']}: {row['taken_gb']:.3f} GB of {row['promised_gb']:.3f} promised "
        f"({row['error']:+.1%}), held by {row['held_by']}, {row['seconds']:.0f} s"
    )


def lines(results: Document) -> list[str]:
    """The document as a reader wants it."""
    columns = [
        Column("run", "name"),
        Column("promised GB", "promised_gb", ".3f"),
        Column("taken GB", "taken_gb", ".3f"),
        Column("promised over taken", "error", "+.1%"),
        Column("held by", "held_by"),
        Column("ended", "ended"),
    ]
    return table(columns, results["rows"])
