#!/usr/bin/env python3
"""Write docs/api.md from docstrings: the Python interface, every policy, every verb."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import tachyscope
from tachyscope import quality, video
from tachyscope.cli.app import BENCH, VERBS
from tachyscope.cli.methods import list_policies
from tachyscope.types import Chunk
from tachyscope.worlds.visit import Visit

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
HEAD = """# The Python interface

Written from docstrings by `python scripts/write_api.py`; do not edit. `import tachyscope as ts`.
"""


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    for name in tachyscope.__all__:
        if name != "__version__":
            parts.append(_described(f"ts.{name}", getattr(tachyscope, name)))
    parts.append(_described("Chunk", Chunk))
    parts.append("## Videos, quality, worlds\n")
    for module, names in {
        "tachyscope.video": [video.VideoWriter, video.read_video, video.read_frames, video.beside],
        "tachyscope.quality": [quality.psnr, quality.horizon],
        "tachyscope.worlds.visit": [Visit],
    }.items():
        parts += [_described(f"{module}.{one.__name__}", one, "###") for one in names]
    parts.append("## Policies\n")
    for policy in list_policies():
        name = f"{policy['part']}={policy['name']}"
        paper = f" From {policy['paper']}." if policy["paper"] else ""
        parts.append(f"### `{name}`\n\n{policy['about']}{paper}\n")
        rows = [
            f"| `{one['name']}` | {one['type'].replace('|', ', ')} | {_cell(one['default'])} | "
            f"{one['about'].replace('|', ', ')} |"
            for one in policy["parameters"]
        ]
        if rows:
            head = ["| parameter | type | default | meaning |", "|---|---|---|---|"]
            parts.append("\n".join([*head, *rows]) + "\n")
    parts.append("## Verbs\n\n[cli.md](cli.md) has every option.\n")
    verbs = VERBS | {f"bench {name}": verb for name, verb in BENCH.items()}
    rows = [f"| `tachyscope {name}` | {_paragraphs(verb)[0]} |" for name, verb in verbs.items()]
    parts.append("\n".join(["| verb | what it does |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def _described(name: str, one: Any, level: str = "##") -> str:
    """A function, or a class with its public methods."""
    out = [f"{level} `{name}`", "", f"```python\n{name}{_signature(one)}\n```", ""]
    out += ["\n\n".join(_paragraphs(one)), ""]
    if inspect.isclass(one) and not issubclass(one, Exception):
        members = {k: x for part in reversed(one.__mro__[:-1]) for k, x in vars(part).items()}
        for key, method in members.items():
            method = getattr(method, "__func__", method)
            if key.startswith("_") or not inspect.isfunction(method) or not method.__doc__:
                continue
            text = " ".join(_paragraphs(method))
            out.append(f"- `{key}{_signature(method)}`: {text}")
        if out[-1]:
            out.append("")
    return "\n".join(out)


def _signature(one: Any) -> str:
    if inspect.isclass(one) and issubclass(one, Exception):
        return ""
    signature = inspect.signature(one)
    kept = [value for name, value in signature.parameters.items() if name not in ("self", "cls")]
    return str(signature.replace(parameters=kept)).replace("'", "")


def _paragraphs(one: Any) -> list[str]:
    """A docstring's paragraphs, each on one line."""
    return [" ".join(part.split()) for part in inspect.cleandoc(one.__doc__).split("\n\n")]


def _cell(value: Any) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    PAGE.write_text(render())
