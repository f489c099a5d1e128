"""Cells and tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tachyscope_lab.evaluation.intervals import versus

Row = Mapping[str, Any]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; every row has a cell for every column."""
    lines = [_line(columns), f"|{'---|' * len(columns)}"]
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"{len(row)} cells for {len(columns)} columns: {row}")
        lines.append(_line(row))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"


def minus(text: str) -> str:
    """A number with a true minus, and no minus before a zero."""
    if not any(digit in text for digit in "123456789"):
        text = text.replace("-", "")
    return text.replace("-", "−")


def number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else minus(f"{value:,.{digits}f}")


def signed(value: float, digits: int = 1) -> str:
    """A difference: its sign is always shown, but of a zero."""
    text = f"{value:+,.{digits}f}"
    return minus(text if any(digit in text for digit in "123456789") else text.lstrip("+-"))


def percent(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{100 * value:.{digits}f} %"


def times(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}x"


def spread(row: Row, key: str, digits: int = 1) -> str:
    """A mean with its 95 % interval."""
    low, high = number(row[f"{key}_low"], digits), number(row[f"{key}_high"], digits)
    return f"{number(row[key], digits)} ({low} to {high})"


def spread_percent(row: Row, key: str) -> str:
    low, high = 100 * row[f"{key}_low"], 100 * row[f"{key}_high"]
    return f"{percent(row[key])} ({low:.0f} to {min(high, 100):.0f})"


def paired(row: Row, base: Row, key: str) -> str:
    """The difference to another row, room by room: mean and 95 % interval."""
    mean, low, high = versus(row, base, key)
    return f"{signed(mean)} ({signed(low)} to {signed(high)})"


def worst_room(row: Row, base: Row, key: str) -> float:
    """The largest loss to another row in any room, below zero."""
    pairs = zip(row["by_world"][key], base["by_world"][key], strict=True)
    return float(min(a - b for a, b in pairs if a is not None and b is not None))
