"""Fast autoregressive video generation without retraining."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tachyscope.errors import TachyscopeError
    from tachyscope.models.causal_lm import token_adapter
    from tachyscope.models.registry import load
    from tachyscope.plan import Plan
    from tachyscope.rollout import rollout
    from tachyscope.session import Session
    from tachyscope.stream import Stream, open

__version__ = "0.1.0"
__all__ = [
    "Plan",
    "Session",
    "Stream",
    "TachyscopeError",
    "__version__",
    "load",
    "open",
    "rollout",
    "token_adapter",
]

# Imported when first used: rooms without torch must not pay for it.
_HOMES = {
    "Plan": "plan",
    "Session": "session",
    "Stream": "stream",
    "TachyscopeError": "errors",
    "load": "models.registry",
    "open": "stream",
    "rollout": "rollout",
    "token_adapter": "models.causal_lm",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # importing the module `rollout` binds its name here, where the function is meant
        if name == "rollout" and isinstance(value, ModuleType):
            value = value.rollout
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
