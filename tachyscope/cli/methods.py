"""`tachyscope methods`: every policy and every named plan."""

from __future__ import annotations

import inspect
import textwrap
import typing
from dataclasses import dataclass
from typing import Any

from tachyscope.cli.verb import Verb
from tachyscope.tables import cell, format_table, terminal_width


@dataclass(frozen=True, kw_only=True)
class Methods(Verb):
    """List every policy with its paper and parameters, and every named plan."""

    def run(self, command: str) -> None:
        from tachyscope.plan import NAMED

        self.check_json()
        results = {"schema": 1, "suite": "methods", "policies": list_policies(), "plans": NAMED}
        if self.prints:
            print(*_lines(results), sep="\n")
        self.emit(results)


def list_policies() -> list[dict[str, Any]]:
    """Every policy with its paper and parameters."""
    from tachyscope.plan import POLICIES
    from tachyscope.settings import settings

    policies = []
    for part, known in POLICIES.items():
        for name, make in known.items():
            parameters = [
                {
                    "name": key,
                    "type": _type_name(one.type),
                    "default": _json_value(one.default),
                    "about": one.about,
                }
                for key, one in settings(make).items()
            ]
            about = inspect.cleandoc(make.__doc__ or "").split("\n\n")[0].replace("\n", " ")
            policy = {"part": part, "name": name, "about": about, "paper": make.paper}
            policies.append(policy | {"parameters": parameters})
    return policies


def _type_name(kind: Any) -> str:
    """A parameter's type as a reader writes its values."""
    options = [option for option in typing.get_args(kind) if option is not type(None)]
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(options)
    if options:
        return _type_name(options[0])
    return str(kind.__name__).lower()


def _json_value(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _lines(results: dict[str, Any]) -> list[str]:
    """Policies, then named plans."""
    out = []
    for policy in results["policies"]:
        about = " ".join(filter(None, (policy["about"], policy["paper"])))
        out += [f"{policy['part']}={policy['name']}", *_wrapped(about, 2)]
        for one in policy["parameters"]:
            default = "" if one["default"] is None else f", default {cell(one['default'])}"
            out += _wrapped(f"{one['name']} ({one['type']}{default}): {one['about']}", 4)
        out.append("")
    for kind, plans in results["plans"].items():
        out += [*format_table([f"plan for {kind}", "stands for"], list(plans.items())), ""]
    return [*out, "stock: what the model's authors run; see tachyscope models --json -"]


def _wrapped(text: str, indent: int) -> list[str]:
    """Text as lines, all but the first of them set further in."""
    ahead, behind = " " * indent, " " * (indent + 2)
    return textwrap.wrap(
        text, min(terminal_width(), 100), initial_indent=ahead, subsequent_indent=behind,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
