"""A policy's parameters: each with its default and a sentence that says what it does."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, NamedTuple

from tachyscope.bounds import LATENTS, SETTINGS, Bound, within
from tachyscope.errors import TachyscopeError
from tachyscope.types import Size


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


def check_settings(policy: Any, part: str, name: str) -> None:
    """Raise where a number that a policy is set to is out of its bounds."""
    for field in dataclasses.fields(policy):
        value = getattr(policy, field.name)
        bound = SETTINGS.get(f"{part} {name}.{field.name}") or SETTINGS.get(field.name)
        if value is None or bound is None:
            continue
        number = value
        if isinstance(value, Size):
            number = value.count
            bound = Bound(1, LATENTS.high) if value.frames else bound
        if not within(bound, number):
            raise TachyscopeError(f"{part} policy {name!r}: {field.name} {bound.rule(value)}")
