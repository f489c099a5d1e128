"""Imports go one way, and hot code never waits for the device."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "tachyscope"
METHODS = {"cache", "store", "attention", "passes", "replay"}
ROWS = [  # a module may import from the rows above its own, and from its own folder
    {"errors", "machine", "compile_cache"},
    {"bounds", "process", "fpga"},
    {"types", "files", "weights", "fingerprint", "numerics", "quality"},
    {"settings", "tables"},
    {"meter", "rates", "peak_memory", "observers", "calibration", "runs"},
    {"kernels"},
    {"store"},
    METHODS - {"store"},
    {"plan"},
    {"layers", "state_file"},
    {"state"},
    {"session"},
    {"decode"},
    {"worlds"},
    {"models"},
    {"graph_runner", "registry", "video"},
    {"arguments", "prefill"},
    {"batch", "held"},
    {"stream"},
    {"rollout", "snapshots"},
    {"report", "results", "plan_notes", "progress"},
    {"memory", "fpga"},
    {"bench"},
    {"evaluation", "inspection", "compare"},
    {"calibrate", "race"},
    {"__init__"},
    {"serve"},
    {"cli"},
    {"__main__"},
]
ROW = {room: i for i, row in enumerate(ROWS) for room in row}
NEVER = {"models": {"kernels", "plan", *METHODS}}  # models know no method
# the accelerator stands alone; only its verbs write files and results as all others do
FPGA = {"errors", "fpga"}
HOT = {"kernels", "layers", "state", "session", *METHODS}
# each makes the host wait for the device
# but where a policy says that it does: it is never part of a CUDA graph
MAY_WAIT = {("flowcache.py", "distance")}
SYNCS = {"item", "tolist", "cpu", "numpy", "nonzero", "print"}
FILES = pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE))
)


def _room(path):
    parts = path.relative_to(PACKAGE).parts
    if parts == ("models", "registry.py"):  # names of models and plans meet there
        return "registry"
    if path.name == "__main__.py":
        return "__main__"
    return parts[0].removesuffix(".py")


def _imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@FILES
def test_imports_go_up_only(path):
    room = _room(path)
    for name in _imports(ast.parse(path.read_text())):
        top, _, rest = name.partition(".")
        if top == "tachyscope":
            other = "registry" if rest == "models.registry" else rest.split(".")[0] or "__init__"
            assert other == room or ROW[other] < ROW[room], f"{room} may not import {other}"
            assert other not in NEVER.get(room, ()), f"{room} may not import {other}"
            if room == "fpga" and path.name != "cli.py":
                assert other in FPGA, f"fpga may not import {other}"


@FILES
def test_hot_code_never_waits_for_the_device(path):
    if _room(path) not in HOT:
        return
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef):
            continue
        if function.name.endswith("_reference"):  # the definition, for tests
            continue
        if (path.name, function.name) in MAY_WAIT:
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                assert name not in SYNCS, f"line {node.lineno}: {name}()"


def test_the_hot_path_imports_no_more_than_torch():
    allowed = {"torch", "numpy", "safetensors", "triton", "tachyscope", "__future__"}
    import sys

    for path in PACKAGE.rglob("*.py"):
        if _room(path) in HOT | {"types", "meter", "plan", "rollout"}:
            for name in _imports(ast.parse(path.read_text())):
                top = name.partition(".")[0]
                assert top in allowed or top in sys.stdlib_module_names, f"{path.name}: {name}"


@FILES
def test_only_the_store_and_the_kernels_slice_keys_and_values(path):
    if _room(path) not in {"store", "kernels", "fpga"}:
        found = re.findall(
            r"\b(?:layer|layers\[\w+\]|here)\.(?:k|v|unrotated)\[[^.\]]*:", path.read_text()
        )
        assert not found, found
