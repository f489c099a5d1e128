"""What there is: policies, models, what the machine can do; and tables of it for a terminal."""

from __future__ import annotations

import inspect
import textwrap
import typing
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tachyscope.compile_cache import programs_folder
from tachyscope.models.registry import MODELS, load
from tachyscope.models.wan.presets import PRESETS
from tachyscope.plan import POLICIES
from tachyscope.results import size_of
from tachyscope.rollout import rollout
from tachyscope.settings import settings

if TYPE_CHECKING:
    from tachyscope.report import Run


def list_policies() -> list[dict[str, Any]]:
    """Every policy with its paper and parameters."""
    found = []
    for part, known in POLICIES.items():
        for name, make in known.items():
            parameters = [
                {
                    "name": key,
                    "type": _type(found.type),
                    "default": _json_value(found.default),
                    "about": found.about,
                }
                for key, found in settings(make).items()
            ]
            about = inspect.cleandoc(make.__doc__).split("\n\n")[0].replace("\n", " ")
            policy = {"part": part, "name": name, "about": about, "paper": make.paper}
            found.append(policy | {"parameters": parameters})
    return found


def _type(kind: Any) -> str:
    """A parameter's type as a reader writes its values."""
    options = [option for option in typing.get_args(kind) if option is not type(None)]
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(options)
    if options:
        return _type(options[0])
    return str(kind.__name__).lower()


def _json_value(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def list_models() -> list[dict[str, Any]]:
    """Every model with what it makes, where that is known before a checkpoint is given."""
    found = []
    for name, entry in MODELS.items():
        row: dict[str, Any] = {"name": name}
        row |= {key: getattr(entry, key) for key in ("about", "weights", "kind")}
        row |= dict.fromkeys(("size", "chunk", "fps", "actions", "stock"))
        if name in PRESETS:
            config = PRESETS[name].config
            pixels = (n * by for n, by in zip(config.size, config.stride[1:], strict=True))
            row["size"] = "x".join(map(str, pixels))
            row |= {key: getattr(config, key) for key in ("chunk", "fps", "actions", "stock")}
        elif not entry.weights:
            model = load(name)
            row["size"] = size_of(next(rollout(model, frames=1)))
            row["chunk"] = model.shape().chunk
            row |= {key: getattr(model, key) for key in ("fps", "actions", "stock")}
        found.append(row)
    return found


def examine() -> list[dict[str, Any]]:
    """What this machine has, and whether it can make and write a video."""
    found = []

    def note(check: str, needed: bool, ok: bool, what: str) -> None:
        found.append({"check": check, "needed": needed, "ok": ok, "found": what})

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device is usable"
    note("cuda", False, torch.cuda.is_available(), gpu)
    for package in ("triton", "diffusers", "transformers"):
        try:
            note(package, False, True, metadata.version(package))
        except metadata.PackageNotFoundError:
            note(package, False, False, "not installed")
    folder = programs_folder()
    kept = f"kept in {folder}" if folder else "no folder of the user's cache can be written"
    note("compiled programs", False, folder is not None, kept)
    for check, attempt in (("libx264", _try_codec), ("rollout", _try_rollouts)):
        try:
            note(check, True, True, attempt())
        except Exception as error:  # whatever is wrong with the machine is what is asked for
            note(check, True, False, f"{type(error).__name__}: {error}".splitlines()[0])
    return found


def _try_codec() -> str:
    import av

    return f"{av.Codec('libx264', 'w').long_name}, av {av.__version__}"


def _try_rollouts() -> str:
    names = [name for name, entry in MODELS.items() if not entry.weights]
    for name in names:
        for _ in rollout(load(name), "fast", frames=2):
            pass
    return f"{', '.join(names)} made 2 frames each"


def show_methods(found: Mapping[str, Any]) -> None:
    """Policies, then named plans."""
    width = min(Console().width, 100)
    for policy in found["policies"]:
        about = " ".join(filter(None, (policy["about"], policy["paper"])))
        print(f"{policy['part']}={policy['name']}", *_wrapped(about, 2, width), sep="\n")
        for p in policy["parameters"]:
            default = "" if p["default"] is None else f", default {_cell(p['default'])}"
            said = f"{p['name']} ({p['type']}{default}): {p['about']}"
            print(*_wrapped(said, 4, width), sep="\n")
        print()
    for kind, plans in found["plans"].items():
        _print_table((f"plan for {kind}", "stands for"), [list(pair) for pair in plans.items()])
    print("stock: what the model's authors run; see tachyscope models --json -")


def _wrapped(text: str, indent: int, width: int) -> list[str]:
    """Text as lines, all but the first of them set further in."""
    ahead, behind = " " * indent, " " * (indent + 2)
    return textwrap.wrap(
        text, width, initial_indent=ahead, subsequent_indent=behind, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def show_models(found: Mapping[str, Any]) -> None:
    """A row a model."""
    columns = ("name", "about", "kind", "size", "chunk", "actions")
    _print_table(columns, [[_cell(row[key]) for key in columns] for row in found["models"]])


def show_doctor(found: Mapping[str, Any]) -> None:
    """The machine and its versions, then what was checked."""
    checks = {row["check"]: row for row in found["rows"]}
    facts = found["machine"] | found["versions"]
    rows = [
        [name, "", _cell(value)]
        for name, value in facts.items()
        if value is not None and name not in checks
    ]
    words = {True: "yes", False: "no"}
    rows += [[name, words[row["ok"]], row["found"]] for name, row in checks.items()]
    _print_table(("", "usable", "found"), rows)


def show_runs(runs: Sequence[Run]) -> None:
    """The runs' sums side by side, then what a reader must know of them."""
    # it loads matplotlib, which the lists need not wait for
    from tachyscope.report import MEASURES

    rows = []
    for measure in MEASURES:
        cells = []
        for run in runs:
            value, simulated = (run.summary.get(f"{x}{measure.key}") for x in ("", "simulated_"))
            if simulated and not value:
                cells.append(f"{measure.write(simulated)} simulated")
            elif measure.key == "ratio_dense" and value and not run.summary["real"]:
                cells.append(f"{measure.write(value)} within noise")
            else:
                cells.append("" if value is None else measure.write(value))
        if any(cells):
            rows.append([measure.name, *cells])
    _print_table(("", *(run.name for run in runs)), rows, numbers=True)
    for run in runs:
        print(f"{run.name}: {run.plan}")
        for note in run.notes:
            print(f"{run.name}: {note}")


def _print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: bool = False
) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for i, name in enumerate(columns):
        # what stands first is a name, and stays whole to be copied
        table.add_column(
            name, justify="right" if numbers and i else "left", overflow="fold", no_wrap=i == 0
        )
    for row in rows:
        # as Text: a bracket in a plan is no markup
        table.add_row(*map(Text, row))
    console = Console()
    # printed by ourselves: where a pipe is closed rich would end the process
    with console.capture() as drawn:
        console.print(table)
    print(drawn.get(), end="")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)
