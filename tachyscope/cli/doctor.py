"""`tachyscope doctor`: what is installed, and whether a video can be made and written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from tachyscope.cli.verb import ResultsVerb
from tachyscope.core.errors import TachyscopeError
from tachyscope.io.tables import cell, format_table


@dataclass(frozen=True, kw_only=True)
class Doctor(ResultsVerb):
    """Check what this machine has, and whether it can generate and write a video."""

    def run(self, command: str) -> None:
        from tachyscope.io.results import document

        self.check_json()
        results = document("doctor", examine(), command)
        if self.prints:
            print(*_lines(results), sep="\n")
        self.emit(results)
        broken = [row["check"] for row in results["rows"] if row["needed"] and not row["ok"]]
        if broken:
            raise TachyscopeError(
                f"this machine cannot serve: {', '.join(broken)} failed, see above"
            )


def examine() -> list[dict[str, Any]]:
    """What is installed, and whether a video can be made and written; a row for each check."""
    import torch

    from tachyscope.decode.cpu_library import find_compiler
    from tachyscope.io.programs import user_folder

    rows = []

    def note(check: str, needed: bool, ok: bool, what: str) -> None:
        rows.append({"check": check, "needed": needed, "ok": ok, "found": what})

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device is usable"
    note("cuda", False, torch.cuda.is_available(), gpu)
    compiler = find_compiler()
    without = "not found: token models run without their native program on a CPU"
    note("C++ compiler", False, compiler is not None, compiler or without)
    for package in ("triton", "diffusers", "transformers"):
        try:
            note(package, False, True, metadata.version(package))
        except metadata.PackageNotFoundError:
            note(package, False, False, "not installed")
    folder = user_folder()
    kept = f"kept in {folder}" if folder else "no folder of the user's cache can be written"
    note("compiled programs", False, folder is not None, kept)
    for check, attempt in (("libx264", _try_codec), ("rollout", _try_rollouts)):
        try:
            note(check, True, True, attempt())
        except Exception as error:  # any failure of the machine is a result
            note(check, True, False, f"{type(error).__name__}: {error}".splitlines()[0])
    return rows


def _try_codec() -> str:
    import av

    return f"{av.Codec('libx264', 'w').long_name}, av {av.__version__}"


def _try_rollouts() -> str:
    from tachyscope.core.rollout import rollout
    from tachyscope.models.registry import MODELS, load

    names = [name for name, entry in MODELS.items() if not entry.weights]
    for name in names:
        for _ in rollout(load(name), "fast", frames=2):
            pass
    return f"{', '.join(names)} made 2 frames each"


def _lines(results: Mapping[str, Any]) -> list[str]:
    """The machine and its versions, then what was checked."""
    checks = {row["check"]: row for row in results["rows"]}
    facts = results["machine"] | results["versions"]
    rows = [
        [name, "", cell(value)]
        for name, value in facts.items()
        if value is not None and name not in checks
    ]
    words = {True: "yes", False: "no"}
    rows += [[name, words[row["ok"]], row["found"]] for name, row in checks.items()]
    return format_table(["", "usable", "found"], rows)
