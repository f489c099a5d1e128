"""A policy's parameters: each with its default and a sentence that says what it does."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """One parameter of a policy."""

    type: Any
    default: Any
    about: str
    instead_of: tuple[str, ...]  # a plan that changes this one drops these of its base


def setting(default: Any, about: str, instead_of: tuple[str, ...] = ()) -> Any:
    """A dataclass field for a parameter, as `settings` reads it."""
    return dataclasses.field(default=default, metadata={"about": about, "instead_of": instead_of})


def settings(policy: Any) -> dict[str, Setting]:
    """A policy's parameters by name."""
    types = typing.get_type_hints(policy)
    return {
        field.name: Setting(
            types[field.name],
            field.default,
            field.metadata.get("about", ""),
            field.metadata.get("instead_of", ()),
        )
        for field in dataclasses.fields(policy)
    }
