"""`tachyscope list`: models, named plans and policies."""

from __future__ import annotations

import inspect
import math
import textwrap
import typing
from dataclasses import dataclass
from typing import Any

from tachyscope.cli.verb import ResultsVerb, option
from tachyscope.core.errors import TachyscopeError, shown
from tachyscope.io.tables import cell, format_table, terminal_width

COLUMNS = ("name", "makes", "weights", "GB", "licence", "runs on")


@dataclass(frozen=True, kw_only=True)
class List(ResultsVerb):
    """List models, plans and policies; a policy's name lists its paper and settings."""

    what: str | None = option(
        None,
        "models, plans, a kind of policy (cache, store, attention, text, passes, replay), or a "
        "policy such as merge. Left out: models, plans and every policy in a line.",
        positional=True,
    )

    def run(self, command: str) -> None:
        from tachyscope.core.plan import NAMED
        from tachyscope.core.policy import QUESTIONS, policies

        self.check_json()
        results: dict[str, Any] = {"schema": 1, "suite": "list"}
        models, plans = self.what in (None, "models"), self.what in (None, "plans")
        kinds = [kind for kind in QUESTIONS if self.what in (None, kind)]
        named = [kind for kind in QUESTIONS if self.what in policies(kind)]
        if not (models or plans or kinds or named):
            known = ", ".join(("models", "plans", *QUESTIONS))
            raise TachyscopeError(
                f"list has no {shown(str(self.what))}; there are: {known}, and every policy's name"
            )
        if models:
            results["models"] = list_models()
        if plans:
            results["plans"] = NAMED
        if kinds or named:
            results["policies"] = [
                policy
                for policy in list_policies()
                if policy["part"] in kinds or policy["name"] == self.what
            ]
        if self.prints:
            print(*_lines(results, whole=bool(named)), sep="\n")
        self.emit(results)


def list_models() -> list[dict[str, Any]]:
    """Every model, with what is known of its videos before a checkpoint is given."""
    from tachyscope.models.registry import MODELS

    rows = []
    for name, entry in MODELS.items():
        weights = "your file" if entry.weights else "random" if entry.random else "in the package"
        if entry.download:
            weights = "download"
        row: dict[str, Any] = {"name": name, "about": entry.about, "kind": entry.kind}
        row |= {"weights": weights, "licence": entry.licence, "gpu": entry.gpu}
        rows.append(row | _configured(name))
    return rows


def _configured(name: str) -> dict[str, Any]:
    """Facts from a model's configuration; None if that comes with its checkpoint."""
    from tachyscope.models.checkpoint import read_json
    from tachyscope.models.registry import MODELS
    from tachyscope.models.vila_u.config import VilaConfig
    from tachyscope.models.vila_u.model import PARTS, VilaModel
    from tachyscope.models.wan.clip_vision import BYTES as CLIP_BYTES
    from tachyscope.models.wan.config import WanConfig
    from tachyscope.models.wan.presets import PRESETS
    from tachyscope.models.wan.sizes import UMT5_BYTES
    from tachyscope.models.waypoint.config import WaypointConfig
    from tachyscope.weights import HERE

    entry, folder = MODELS[name], HERE / name
    config: Any = None
    size = 0.0
    if name in PRESETS:
        config = PRESETS[name].config
        size = _transformer_gb(config.dim, config.ffn_dim, config.layers) + 0.5
        size += (CLIP_BYTES if config.action_modules else UMT5_BYTES) / 1e9
    elif name == "waypoint":
        config = WaypointConfig()
        size = 2 * sum(math.prod(shape) for shape in config.tensors().values()) / 1e9
    elif entry.random:
        config = vars(entry.make())["config"]  # toys are made at once
    elif not entry.weights:
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e9
        if entry.kind == "tokens":
            parts = {p: read_json(folder / p / "config.json") for p in ("", *PARTS)}
            config = VilaConfig.parse(parts)
        else:
            config = WanConfig.from_json(read_json(folder / "config.json"))
    if isinstance(config, VilaConfig):
        made: dict[str, Any] = {"size": config.size, "chunk": 1, "stock": VilaModel.stock}
    elif isinstance(config, WanConfig):
        pixels = [n * by for n, by in zip(config.size, config.stride[1:], strict=True)]
        made = {"size": pixels, "chunk": config.chunk, "stock": config.stock}
    elif isinstance(config, WaypointConfig):
        made = {"size": config.size, "chunk": 1, "stock": config.stock}
    else:
        return dict.fromkeys(("size", "chunk", "fps", "actions", "stock", "gb"))
    made["size"] = "x".join(map(str, made["size"]))
    return made | {"fps": config.fps, "actions": config.actions, "gb": round(size, 2) or None}


def _transformer_gb(dim: int, ffn_dim: int, layers: int) -> float:
    """GB of a Wan-type transformer in bfloat16, its small parts left out."""
    return 2 * layers * (8 * dim * dim + 2 * dim * ffn_dim) / 1e9


def list_policies() -> list[dict[str, Any]]:
    """Every policy with its paper and parameters."""
    from tachyscope.core.policy import QUESTIONS, policies, settings

    listed = []
    for part in QUESTIONS:
        for name, make in policies(part).items():
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
            listed.append(policy | {"parameters": parameters})
    return listed


def _type_name(kind: Any) -> str:
    """A parameter's type in words."""
    options = [option for option in typing.get_args(kind) if option is not type(None)]
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(options)
    if options:
        return _type_name(options[0])
    return str(kind.__name__).lower()


def _json_value(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _lines(results: dict[str, Any], whole: bool) -> list[str]:
    """Models, named plans, then policies: a line each; whole: with their settings."""
    out: list[str] = []
    if "models" in results:
        out += [*format_table(COLUMNS, [_model_cells(row) for row in results["models"]])]
        out += ["and a model of your own: my.py:MyWorld", ""]
    for kind, plans in results.get("plans", {}).items():
        out += [*format_table([f"plan for {kind}", "stands for"], list(plans.items())), ""]
    if "plans" in results:
        out += ["stock: what the model's authors run; see tachyscope list models --json -", ""]
    for policy in results.get("policies", ()):
        about = " ".join(filter(None, (policy["about"], policy["paper"])))
        out += [f"{policy['part']}={policy['name']}", *_wrapped(about, 2)]
        if not whole and len(results["policies"]) > 1 and "models" in results:
            continue
        for one in policy["parameters"]:
            default = "" if one["default"] is None else f", default {cell(one['default'])}"
            out += _wrapped(f"{one['name']} ({one['type']}{default}): {one['about']}", 4)
        out.append("")
    if "models" in results and "policies" in results:
        out += ["", "settings of a policy: tachyscope list merge, of a kind: tachyscope list cache"]
    return out


def _model_cells(row: dict[str, Any]) -> list[str]:
    makes = f"{row['size'] or 'by its file'}, {row['kind']}"
    if row["actions"]:
        makes += f", actions {row['actions']}"
    gb = "" if row["gb"] is None else cell(row["gb"])
    runs = "GPU, extra [hf]" if row["gpu"] else "CPU or GPU"
    return [row["name"], makes, row["weights"], gb, row["licence"], runs]


def _wrapped(text: str, indent: int) -> list[str]:
    """Wrapped text, with later lines indented further."""
    ahead, behind = " " * indent, " " * (indent + 2)
    return textwrap.wrap(
        text, min(terminal_width(), 100), initial_indent=ahead, subsequent_indent=behind,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
