#!/usr/bin/env python3
"""Run the notebooks and store what their cells print and show, so that pages of code show it.

    python scripts/run_notebooks.py notebooks/*.ipynb

A cell shows the value of its last line: a figure of matplotlib's or a picture of Pillow's.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def run(path: Path) -> None:
    """Run a notebook's cells in order, in one namespace, and write it with their outputs."""
    notebook = json.loads(path.read_text())
    space: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            cell["execution_count"] = count
            cell["outputs"] = outputs("".join(cell["source"]), space, f"{path.name}, cell {count}")
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def outputs(source: str, space: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """What a cell prints, and the picture that its last line stands for."""
    body, said, value = ast.parse(source).body, io.StringIO(), None
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(said):
        exec(compile(ast.Module(body, []), name, "exec", dont_inherit=True), space)
        if last is not None:
            code = compile(ast.Expression(last.value), name, "eval", dont_inherit=True)
            value = eval(code, space)
    found: list[dict[str, Any]] = []
    if said.getvalue():
        text = said.getvalue().splitlines(keepends=True)
        found.append({"name": "stdout", "output_type": "stream", "text": text})
    if (data := picture(value)) is not None:
        image = base64.b64encode(data).decode()
        shown = {"image/png": image, "text/plain": ["a picture"]}
        found.append({"data": shown, "metadata": {}, "output_type": "display_data"})
    return found


def picture(value: Any) -> bytes | None:
    """A figure or picture as PNG; None where a value is neither."""
    file = io.BytesIO()
    if hasattr(value, "savefig"):
        value.savefig(file, format="png", dpi=70)
    elif hasattr(value, "getbands"):  # of Pillow
        value.convert("RGB").quantize(128).save(file, format="png", optimize=True)
    else:
        return None
    return file.getvalue()


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        run(Path(argument))
        print(argument)
