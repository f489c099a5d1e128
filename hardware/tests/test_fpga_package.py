"""What tachyscope-fpga imports and installs: Amaranth and NumPy; neither torch nor tachyscope."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import tachyscope_fpga

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tachyscope_fpga"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_only_amaranth_and_numpy_are_imported():
    allowed = {"amaranth", "numpy", "tachyscope_fpga", *sys.stdlib_module_names}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.partition(".")[0] for name in names} <= allowed, path.name
    named = {re.match(r"[\w-]+", line)[0] for line in PROJECT["dependencies"]}
    assert named == {"amaranth", "numpy"}


def test_importing_every_module_imports_neither_torch_nor_tachyscope():
    code = """
import importlib, pkgutil, sys, tachyscope_fpga
for module in pkgutil.walk_packages(tachyscope_fpga.__path__, "tachyscope_fpga."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert "tachyscope_fpga.decoder.top" in sys.modules
assert not {"torch", "tachyscope"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_function_of_the_hardware_is_longer_than_100_lines():
    for path in [*PACKAGE.glob("parts/*.py"), *PACKAGE.glob("decoder/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 100, f"{path.name}: {node.name}"


def test_versions_and_licenses_agree():
    product = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    assert PROJECT["version"] == tachyscope_fpga.__version__ == product["version"]
    assert PROJECT["requires-python"] == product["requires-python"]
    assert (ROOT / "LICENSE").read_text() == (ROOT.parent / "LICENSE").read_text()
