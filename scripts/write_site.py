#!/usr/bin/env python3
"""Write the pages of the site that `make docs` builds: README, docs/, and two references.

    python scripts/write_site.py out/docs

The references are made from the code: the command line's from the dataclass of each verb, the
library's from docstrings. They are not committed.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tachyscope
from tachyscope.cli.app import VERBS
from tachyscope.cli.verb import options_of
from tachyscope.core.policy import QUESTIONS, policies, settings

ROOT = Path(__file__).resolve().parents[1]
HOME = "index.md"
# what pages link to beside docs/: where it stands on the site
BESIDE = ("notebooks", "examples", "comfyui", "results", "CITATION.cff", "LICENSE")
LEFT_OUT = shutil.ignore_patterns("__pycache__")
# public names beside those of tachyscope itself
ALSO = {
    "tachyscope.core.types": ["Chunk"],
    "tachyscope.io.video": ["VideoWriter", "read_video", "read_frames", "beside"],
    "tachyscope.measure.quality": ["psnr"],
    "tachyscope.snapshot.folder": ["Snapshots"],
    "tachyscope.models.base": ["VideoModel"],
    "tachyscope.core.observers": ["Observer"],
}


def write_site(folder: Path) -> list[Path]:
    """Every page of the site, and what the pages link to."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder)
    for name in BESIDE:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=LEFT_OUT)
        elif source.exists():
            shutil.copy(source, folder / name)
    (folder / HOME).write_text((ROOT / "README.md").read_text().replace("](docs/", "]("))
    (folder / "cli.md").write_text(command_line())
    (folder / "api.md").write_text(library())
    pages = sorted(folder.glob("*.md"))
    for page in pages:  # the repository's root is the site's
        page.write_text(page.read_text().replace("](../", "]("))
    return pages


def command_line() -> str:
    """Every verb with its options."""
    parts = ["# Command line", "Made from the code. `tachyscope VERB --help` prints the same."]
    for name, verb in VERBS.items():
        parts += [f"## tachyscope {name}", *_paragraphs(verb)]
        rows = []
        for one in options_of(verb):
            needed = one.default is dataclasses.MISSING
            shown = one.name.upper() if one.positional else one.flag
            default = "" if needed or one.default in (None, False, "", ()) else f"`{one.default}`"
            rows.append([f"`{shown}`", one.help, "required" if needed else default])
        parts += _table(["option", "meaning", "default"], rows)
    return "\n\n".join(parts) + "\n"


def library() -> str:
    """The public names, and every policy with its settings."""
    parts = ["# Library", "Made from docstrings. `import tachyscope as ts`."]
    for name in tachyscope.__all__:
        one = getattr(tachyscope, name)
        if callable(one) and not _is_policy(one):
            parts += _described(f"ts.{name}", one)
    for module, names in ALSO.items():
        for name in names:
            parts += _described(f"{module}.{name}", getattr(importlib.import_module(module), name))
    parts.append("## Policies")
    for kind in QUESTIONS:
        for name, policy in policies(kind).items():
            paper = f" From {policy.paper}." if policy.paper else ""
            public = f" `ts.{policy.__name__}`." if policy.__name__ in tachyscope.__all__ else ""
            parts += [f"### `{kind}={name}`", f"{_paragraphs(policy)[0]}{paper}{public}"]
            rows = [
                [f"`{key}`", _text(one.default), one.about] for key, one in settings(policy).items()
            ]
            parts += _table(["setting", "default", "meaning"], rows)
    return "\n\n".join(parts) + "\n"


def _is_policy(one: Any) -> bool:
    return any(one in policies(kind).values() for kind in QUESTIONS)


def _described(name: str, one: Any) -> list[str]:
    """A function, or a class with its public methods."""
    out = [f"## `{name}`", f"```python\n{name}{_signature(one)}\n```", *_paragraphs(one)]
    if inspect.isclass(one) and not issubclass(one, Exception):
        lines = [
            f"- `{key}{_signature(method)}`: {' '.join(_paragraphs(method))}"
            for key, method in _methods(one)
        ]
        out += ["\n".join(lines)] if lines else []
    return out


def _methods(one: type) -> Iterator[tuple[str, Any]]:
    members = {k: x for part in reversed(one.__mro__[:-1]) for k, x in vars(part).items()}
    for key, method in members.items():
        method = getattr(method, "__func__", method)
        if not key.startswith("_") and inspect.isfunction(method) and method.__doc__:
            yield key, method


def _signature(one: Any) -> str:
    if inspect.isclass(one) and issubclass(one, Exception):
        return ""
    signature = inspect.signature(one)
    kept = [value for name, value in signature.parameters.items() if name not in ("self", "cls")]
    return str(signature.replace(parameters=kept)).replace("'", "")


def _paragraphs(one: Any) -> list[str]:
    """A docstring's paragraphs, each on one line."""
    text = inspect.cleandoc(one.__doc__ or "")
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]


def _text(value: Any) -> str:
    return "" if value is None else f"`{str(value).lower() if value is True else value}`"


def _table(columns: list[str], rows: list[list[str]]) -> list[str]:
    lines = [" | ".join(columns), " | ".join(["---"] * len(columns))]
    lines += [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    return ["\n".join(f"| {line} |" for line in lines)] if rows else []


if __name__ == "__main__":
    for path in write_site(Path(sys.argv[1])):
        print(path)
