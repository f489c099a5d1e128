"""A user's own model: imported from a module or a file, and constructed."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tachyscope.core.errors import TachyscopeError, first_line
from tachyscope.models.base import VideoModel


def find_maker(name: str, home: str, attribute: str) -> Any:
    """An attribute of a module, or of a file that ends in .py."""
    try:
        module = _run(Path(home)) if home.endswith(".py") else import_module(home)
    except TachyscopeError:
        raise
    except Exception as fault:
        kind = type(fault).__name__
        raise TachyscopeError(
            f"model {name!r}: {home} cannot be imported: {kind}: {first_line(fault)}"
        ) from fault
    if not hasattr(module, attribute):
        raise TachyscopeError(f"model {name!r}: {home} has no {attribute}: name a class in it")
    return getattr(module, attribute)


def _run(path: Path) -> ModuleType:
    """Import a file, which may import files beside it, as a script may."""
    if not path.is_file():
        raise TachyscopeError(f"there is no file {path}: give the path of your model's .py")
    spec = spec_from_file_location(f"tachyscope_own_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)
    spec.loader.exec_module(module)
    return module


def make_own(name: str, make: Callable[..., VideoModel], **given: Any) -> VideoModel:
    """Construct a user's model with those keywords that it takes."""
    try:
        takes = dict(inspect.signature(make).parameters)
    except ValueError:  # written in C
        takes = {}
    every = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in takes.values())
    passed = {key: value for key, value in given.items() if every or key in takes}
    if "weights" in given and "weights" not in passed:
        raise TachyscopeError(f"model {name!r} takes no weights: leave `weights` out")
    try:
        model = make(**passed)
    except TypeError as fault:  # an abstract method that is missing, an argument without a default
        raise TachyscopeError(f"model {name!r} cannot be made: {first_line(fault)}") from fault
    model = VideoModel.narrow(
        model, f"model {name!r} must make a VideoModel, got a {type(model).__name__}"
    )
    if model.name == VideoModel.name:
        model.name = name
    for key, kind in (("device", torch.device), ("dtype", torch.dtype)):
        made = getattr(model, key)
        if not isinstance(made, kind):
            raise TachyscopeError(
                f"model {name!r} must have a torch.{key} as self.{key}, got {made!r}: set one, or "
                f"leave it out"
            )
        if key not in passed and not _same(made, given[key]):
            raise TachyscopeError(
                f"model {name!r} has no parameter `{key}` and is on {made}, got {given[key]}: give "
                f"its __init__ one"
            )
    return model


def _same(made: Any, given: Any) -> bool:
    """Whether a model's device or dtype is the given one; `cuda` is any CUDA device."""
    if isinstance(given, torch.device) and given.index is None:
        return made.type == given.type
    return made == given
