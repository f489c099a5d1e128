"""Imports go one way, and hot code never waits for the device."""

import ast
import re
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "tachyscope"
METHODS = {"cache", "store", "attention", "passes", "replay"}
ROWS = [  # a module may import from its own row and from those above; a folder is all its others
    {
        "core.errors",
        "core.features",
        "core.guard",
        "core.limits",
        "core.meter",
        "core.observers",
        "core.policy",
        "core.ranks",
        "core.types",
        "core.work",
        "io",
        "measure.quality",
        "memory.allocations",
        "weights",
    },
    {"kernels"},
    {"store"},
    METHODS - {"store"},
    {
        "core.exchange",
        "core.kv_allocation",
        "core.plan",
        "core.session",
        "core.session_snapshot",
        "core.session_state",
        "snapshot.format",
    },
    {"decode", "models"},
    {"core", "core.rollout", "registry"},
    {"integrations", "measure", "memory", "snapshot"},
    {"__init__", "__main__", "cli", "serve"},
]
ROW = {room: i for i, row in enumerate(ROWS) for room in row}
NEVER = {
    "models": {"kernels", "core.plan", *METHODS},  # models know no method
    "decode": {"models"},
    "serve": {"cli"},
    **{method: METHODS - {"store", method} for method in METHODS - {"store"}},
}
FAMILIES = sorted(x.name for x in (PACKAGE / "models").iterdir() if x.is_dir()) + ["toys"]
HOT = {"kernels", "core.kv_allocation", "core.session_state", "core.session", *METHODS}
# each makes the host wait for the device
# but where a policy says that it does: it is never part of a CUDA graph
MAY_WAIT = {("flowcache.py", "distance")}
SYNCS = {"item", "tolist", "cpu", "numpy", "nonzero", "print"}
LIGHT = {"torch", "numpy", "safetensors", "triton", "__future__"}  # all that hot code imports
LIGHT_ROOMS = {"core.types", "core.meter", "core.plan", "core.rollout"}
OTHERS = {"tachyscope_lab", "tachyscope_fpga"}  # they import the package, never the other way
TREES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def _room(path):
    parts = path.relative_to(PACKAGE).parts
    if parts == ("models", "registry.py"):  # names of models and plans meet there
        return "registry"
    if parts[:2] == ("integrations", "comfyui"):  # it uses the package, as a command does
        return "cli"
    if path.name == "__main__.py":
        return "__main__"
    inner = ".".join(parts[:2]).removesuffix(".py")
    return inner if inner in ROW else parts[0].removesuffix(".py")


def _imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _room_of(name):
    """The room of an imported module of the package, as ROW has it."""
    rest = name.partition(".")[2]
    other = "registry" if rest == "models.registry" else rest.split(".")[0] or "__init__"
    inner = ".".join(rest.split(".")[:2])
    return inner if inner in ROW else other


def _forbidden(room, name):
    """Why a module of this room may not import this name, or nothing."""
    top = name.partition(".")[0]
    if top in OTHERS:
        return "another distribution"
    if top != "tachyscope":
        light = top in LIGHT or top in sys.stdlib_module_names
        return "" if light or room not in HOT | LIGHT_ROOMS else "more than torch"
    other = _room_of(name)
    if ROW[other] > ROW[room]:
        return "no row above"
    return "a method" if other in NEVER.get(room, ()) else ""


def test_imports_go_one_way():
    found = [
        f"{path.relative_to(PACKAGE)} imports {name}: {why}"
        for path, tree in TREES.items()
        for name in _imports(tree)
        if (why := _forbidden(_room(path), name))
    ]
    assert not found, "\n".join(found)


def test_no_modules_import_one_another():
    """Late imports count; those that are for types alone do not."""
    paths = {_module(path): path for path in TREES}
    graph = {}
    for module, path in paths.items():
        branches = [node for node in ast.walk(TREES[path]) if isinstance(node, ast.If)]
        typed = [x.body for x in branches if getattr(x.test, "id", "") == "TYPE_CHECKING"]
        skipped = {node for body in typed for one in body for node in ast.walk(one)}
        froms = {x for x in ast.walk(TREES[path]) if isinstance(x, ast.ImportFrom)} - skipped
        names = {(x.module, f"{x.module}.{alias.name}") for x in froms for alias in x.names}
        graph[module] = {b if b in paths else a for a, b in names} - {module}
    circle = []
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as fault:
        circle = fault.args[1]
    assert not circle, " imports ".join(reversed(circle))


def _module(path):
    inside = path.relative_to(PACKAGE.parent).with_suffix("")
    return ".".join(inside.parts).removesuffix(".__init__")


def test_the_loop_names_no_model():
    """Camera, actions and where a world begins are what a model says of itself."""
    homes = (f"tachyscope.models.{family}" for family in FAMILIES)
    banned = {"core": tuple(homes), "models/base.py": ("tachyscope.decode",)}
    found = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for place, names in banned.items()
        for path, tree in TREES.items()
        if (PACKAGE / place) in (path, *path.parents)
        for name in _imports(tree)
        if name.startswith(names)
    ]
    assert not found, "\n".join(found)


def test_hot_code_never_waits_for_the_device():
    found = []
    for path, tree in TREES.items():
        functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
        for function in functions if _room(path) in HOT else ():
            # a definition is for tests
            if function.name.endswith("_reference") or (path.name, function.name) in MAY_WAIT:
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Call):
                    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                    if name in SYNCS:
                        found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {name}()")
    assert not found, "\n".join(found)


def test_only_the_store_and_the_kernels_slice_keys_and_values():
    sliced = re.compile(r"\b(?:layer|layers\[\w+\]|here)\.(?:k|v|unrotated)\[[^.\]]*:")
    found = [
        f"{path.relative_to(PACKAGE)}: {hit}"
        for path in TREES
        if _room(path) not in {"store", "kernels"}
        for hit in sliced.findall(path.read_text())
    ]
    assert not found, "\n".join(found)
