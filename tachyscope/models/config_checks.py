"""What the configurations of all model families check alike."""

from __future__ import annotations

from typing import Any

from tachyscope.bounds import Bound, within
from tachyscope.errors import TachyscopeError


def demand(right: bool, whose: str, rule: str, got: object) -> None:
    """Raise unless a configuration is as the rule says."""
    if not right:
        raise TachyscopeError(f"{whose} {rule}, got {got}: change it")


def has_type(value: Any, kind: type) -> bool:
    """As JSON has types: 10000 may stand for 10000.0, and true is no number."""
    return type(value) is kind or (kind is float and type(value) is int)


def bound_fault(bound: Bound, value: float | str) -> str | None:
    """What a number must be, or a text by its length; None where it is."""
    if isinstance(value, str):
        return None if within(bound, len(value)) else f"at most {bound.high:,} letters"
    return None if within(bound, value) else str(bound)
