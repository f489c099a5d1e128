"""`tachyscope models`: every model and what it makes, from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tachyscope.cli.verb import Verb
from tachyscope.tables import cell, format_table

COLUMNS = ("name", "kind", "size", "chunk", "actions", "about")


@dataclass(frozen=True, kw_only=True)
class Models(Verb):
    """List the models, what they are and what they make."""

    def run(self, command: str) -> None:
        self.check_json()
        results: dict[str, Any] = {"schema": 1, "suite": "models", "models": list_models()}
        if self.prints:
            rows = [[cell(row[key]) for key in COLUMNS] for row in results["models"]]
            print(*format_table(COLUMNS, rows), sep="\n")
        self.emit(results)


def list_models() -> list[dict[str, Any]]:
    """Every model with what it makes, where that is known before a checkpoint is given."""
    from tachyscope.models.registry import MODELS

    rows = []
    for name, entry in MODELS.items():
        row: dict[str, Any] = {"name": name}
        row |= {key: getattr(entry, key) for key in ("about", "weights", "kind")}
        rows.append(row | _configured(name))
    return rows


def _configured(name: str) -> dict[str, Any]:
    """What a model's configuration says of it; nothing of one that comes with its checkpoint."""
    from tachyscope.models.checkpoint import read_json
    from tachyscope.models.registry import MODELS
    from tachyscope.models.vila_u.config import VilaConfig
    from tachyscope.models.vila_u.model import PARTS, VilaModel
    from tachyscope.models.wan.config import WanConfig
    from tachyscope.models.wan.presets import PRESETS
    from tachyscope.weights import HERE

    entry, folder = MODELS[name], HERE / name
    config: Any = None
    if name in PRESETS:
        config = PRESETS[name].config
    elif entry.random:
        config = vars(entry.make())["config"]  # a toy: made of it in a blink
    elif not entry.weights and entry.kind == "tokens":
        config = VilaConfig.parse({p: read_json(folder / p / "config.json") for p in ("", *PARTS)})
    elif not entry.weights:
        config = WanConfig.from_json(read_json(folder / "config.json"))
    if isinstance(config, VilaConfig):
        made: dict[str, Any] = {"size": config.size, "chunk": 1, "stock": VilaModel.stock}
    elif isinstance(config, WanConfig):
        pixels = [n * by for n, by in zip(config.size, config.stride[1:], strict=True)]
        made = {"size": pixels, "chunk": config.chunk, "stock": config.stock}
    else:
        return dict.fromkeys(("size", "chunk", "fps", "actions", "stock"))
    made["size"] = "x".join(map(str, made["size"]))
    return made | {"fps": config.fps, "actions": config.actions}
