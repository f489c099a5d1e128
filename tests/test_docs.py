"""Pages that are written by a script are current, and notebooks run."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_the_api_page_is_current():
    script = runpy.run_path(str(ROOT / "scripts" / "write_api.py"))
    assert script["PAGE"].read_text() == script["render"](), "run python scripts/write_api.py"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, capsys):
    """Its cells in order, in one namespace; each notebook asserts what it shows."""
    cells = json.loads(path.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert any("assert " in text for text in code)
    # a dataclass looks its module up by name
    space = {"__name__": "__main__"}
    for number, text in enumerate(code):
        exec(compile(text, f"{path.name}, cell {number}", "exec"), space)
    assert capsys.readouterr().out


def test_there_are_three_notebooks_without_outputs():
    assert len(NOTEBOOKS) == 3
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text())["cells"]
        assert all(not cell.get("outputs") for cell in cells)
