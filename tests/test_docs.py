"""Pages: links lead somewhere, names and files exist, commands parse, code runs."""

import ast
import importlib
import json
import re
import runpy
import shlex
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest

import tachyscope
from tachyscope.core.plan import NAMED
from tachyscope.core.policy import QUESTIONS, policies
from tachyscope.io.video import read_frames
from tachyscope.models.registry import MODELS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "results/README.md"]
CHANGELOG = ROOT / "CHANGELOG.md"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
NO_VERBS = {"does", "camera"}  # behind the package's name in a sentence, and in a thread's name
# written like a name of Python's, and none
NO_NAMES = {"tachyscope.v1", "tachyscope.policies"}  # a subprotocol, a group of entry points


def anchors(text):
    """The anchors of a page's headings, as GitHub makes them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", heading).lower()
        kept = (c for c in plain if unicodedata.category(c)[0] in "LN" or c in " -_")
        found.add("".join(kept).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page):
    text = FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", text):
        path, _, anchor = (target[0] or target[1]).partition("#")
        if path.startswith(("http:", "https:")):
            continue
        file = page.parent / path if path else page
        assert file.exists(), path
        assert not anchor or anchor in anchors(file.read_text()), f"{path}#{anchor}"


@pytest.mark.parametrize("page", [*PAGES, CHANGELOG], ids=lambda page: page.name)
def test_every_name_of_the_library_exists(page):
    text = page.read_text()
    for name in set(re.findall(r"\btachyscope(?:\.[A-Za-z_]\w*)+", text)) - NO_NAMES:
        if not name.endswith((".py", ".html", ".mp4")):
            resolve(name)
    for name in set(re.findall(r"\bts\.([A-Za-z_]\w*)", text)):
        assert hasattr(tachyscope, name), f"ts.{name}"
    for module, names in re.findall(r"^from (tachyscope[\w.]*) import (.+)$", text, re.M):
        for name in names.split(", "):
            resolve(f"{module}.{name}")


def resolve(name):
    """What a dotted name stands for; fails where nothing does."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page):
    named = re.findall(r"`((?:[\w-]+/)+[\w-]+\.(?:py|md|json|ipynb|cpp))`", page.read_text())
    for path in named:
        homes = (ROOT, ROOT / "tachyscope", ROOT / "hardware", ROOT / "hardware/tachyscope_fpga")
        assert any((home / path).exists() for home in homes), path


def test_every_method_plan_and_model_is_on_its_page():
    methods = (ROOT / "docs/methods.md").read_text()
    for kind in QUESTIONS:
        for name in policies(kind):
            assert re.search(rf"`(?:{kind}=)?{name}`|^### {name}$", methods, re.M), (kind, name)
    guide = (ROOT / "docs/guide.md").read_text()
    assert all(f"`{name}`" in guide for name in NAMED["chunks"])
    models = (ROOT / "docs/models.md").read_text()
    assert all(f"`{name}`" in models for name in MODELS)


def commands():
    """The commands of all pages, in blocks and in sentences: a page's name and the words."""
    for page in PAGES:
        text = page.read_text()
        for block in re.findall(r"^```(?:sh)?\n(.*?)^```$", text, re.M | re.S):
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith(("tachyscope ", "tachyscope-lab ")):
                    yield page.name, shlex.split(line, comments=True)
        for line in FENCE.sub("", text).splitlines():
            for command in re.findall(r"`(tachyscope(?:-lab)? [^`]+)`", line):
                # `tachyscope fit` names a verb; results made by an earlier command name today's
                if len(words := shlex.split(command)) > 2 and "today's command" not in line:
                    yield page.name, words


@pytest.mark.parametrize(
    "page, words", list(commands()), ids=lambda x: x if isinstance(x, str) else ""
)
def test_every_command_of_the_pages_parses(page, words):
    if words[0] == "tachyscope":
        from tachyscope.cli.app import app
    else:
        from tachyscope_lab.cli.app import app
    app.parse_args(words[1:], exit_on_error=False, print_error=False)


def test_the_changelog_names_every_verb_plan_and_function():
    from tachyscope.cli.app import VERBS

    code = re.findall(r"`([^`]+)`", CHANGELOG.read_text())
    words = {word for span in code for word in span.split()}
    assert {*VERBS, *(name for plans in NAMED.values() for name in plans)} <= words
    functions = {f"ts.{name}" for name in tachyscope.__all__ if name[0].islower()}
    assert functions <= words


def test_every_command_that_a_message_of_the_code_names_is_a_verb():
    from tachyscope.cli.app import VERBS
    from tachyscope_lab.cli.app import VERBS as LAB

    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} {name} {word}"
        for folder in ("tachyscope", "lab/tachyscope_lab")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for name, word in re.findall(r"\b(tachyscope|tachyscope-lab) ([a-z]+)\b", node.value)
        if word not in {"tachyscope": VERBS, "tachyscope-lab": [*LAB, "bench", "metrics"]}[name]
        and word not in NO_VERBS
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_the_example_of_the_page_is_the_file_and_runs():
    example = ROOT / "examples/my_world.py"
    page = (ROOT / "docs/bring-your-own-model.md").read_text()
    assert example.read_text() in page
    ran = subprocess.run([sys.executable, example], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout in page


@pytest.mark.slow
def test_the_site_has_every_verb_and_every_public_name(tmp_path):
    site = runpy.run_path(str(ROOT / "scripts" / "write_site.py"))
    pages = {page.name: page.read_text() for page in site["write_site"](tmp_path / "docs")}
    nav = re.findall(r"^  - .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert set(nav) == pages.keys() | {"results/README.md"}
    for verb, options in site["VERBS"].items():
        section = pages["cli.md"].split(f"## tachyscope {verb}\n")[1].split("\n## ")[0]
        assert all(one.flag in section or one.positional for one in site["options_of"](options))
    for name in set(tachyscope.__all__) - {"__version__"}:
        assert f"`ts.{name}`" in pages["api.md"], name
    for page, text in pages.items():
        for path in re.findall(r"\]\(([^)#\s]+)", FENCE.sub("", text)):
            assert ":" in path or (tmp_path / "docs" / path).exists(), f"{page}: {path}"


@pytest.mark.slow
def test_the_demo_shows_its_lanes_and_says_where(tmp_path):
    # as `make demo`, of a short walk
    code = (
        "import pathlib, runpy; demo = runpy.run_path('scripts/demo')['demo']; "
        "demo.__globals__.update(GIVEN=5, FRAMES=2, WALK='q*6'); demo(pathlib.Path('OUT'))"
    )
    words = [sys.executable, "-c", code.replace("OUT", str(tmp_path))]
    ran = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    rows = json.loads((tmp_path / "compare.json").read_text())["rows"]
    lanes = ["full cache", "window of 21 frames", "Tachyscope, plan pose"]
    assert [row["name"] for row in rows] == lanes
    assert all(row["surfaces_right"] > 0.5 for row in rows)
    shown, page = tmp_path / "compare.mp4", tmp_path / "report.html"
    assert ran.stdout.endswith(f"Watch {shown}, and open {page} in a browser.\n")
    assert shown.exists() and "<video" in page.read_text()


@pytest.mark.slow
def test_the_readmes_python_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    exec(compile(code, "README.md", "exec"), {})
    assert len(read_frames(tmp_path / "room.mp4")) == 14


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, capsys, own_policies):
    """Its cells in order, in one namespace; each notebook asserts what it shows."""
    cells = json.loads(path.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert any("assert " in text for text in code)
    # a dataclass looks its module up by name
    space = {"__name__": "__main__"}
    for number, text in enumerate(code):
        exec(compile(text, f"{path.name}, cell {number}", "exec"), space)
    assert capsys.readouterr().out


def test_there_are_three_notebooks():
    assert len(NOTEBOOKS) == 3


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_it_prints_and_a_picture(path):
    shown = [
        out for cell in json.loads(path.read_text())["cells"] for out in cell.get("outputs", [])
    ]
    assert any("text" in out for out in shown)
    assert any("image/png" in out.get("data", {}) for out in shown)
    assert path.stat().st_size < 200_000
