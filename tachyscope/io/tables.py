"""Text tables for the terminal and for logs."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

GAP = "  "


class Column(NamedTuple):
    """A column of a table: its heading, and the value of a row that it shows."""

    head: str
    of: str | Callable[[Mapping[str, Any]], object]  # a key of the row, or a function of it
    form: str = ""  # format spec of the value
    unit: str = ""  # suffix of the value
    none: str = ""  # shown if a row has no value

    def cell(self, row: Mapping[str, Any]) -> str:
        value = row.get(self.of) if isinstance(self.of, str) else self.of(row)
        return self.none if value is None else f"{value:{self.form}}{self.unit}"


def table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of a table of rows."""
    cells = [[column.cell(row) for column in columns] for row in rows]
    return format_table([column.head for column in columns], cells)


def format_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: numbers aligned right, words left; a row's last cells may be missing.

    The first column is always words. A last column of words is wrapped to the terminal's width.
    """
    every = [columns, *rows]
    widths = [max(len(row[i]) for row in every if i < len(row)) for i in range(len(columns))]
    right = [
        i > 0 and _is_numbers([row[i] for row in rows if i < len(row)]) for i in range(len(widths))
    ]
    before = sum(widths[:-1]) + len(GAP) * (len(widths) - 1)
    if not right[-1]:
        widths[-1] = min(widths[-1], max(terminal_width() - before, 24))
    lines = []
    for row in every:
        cells = [
            cell.rjust(width) if numbers else cell.ljust(width)
            for cell, width, numbers in zip(row, widths, right, strict=False)
        ]
        folded = [""]
        if len(row) == len(columns) and not right[-1]:
            # words are not broken, so that they can be copied
            folded = textwrap.wrap(
                row[-1], widths[-1], break_on_hyphens=False, break_long_words=False
            ) or [""]
            cells[-1] = folded[0]
        lines.append(GAP.join(cells).rstrip())
        lines += [" " * before + line for line in folded[1:]]
    return lines


def _is_numbers(cells: Sequence[str]) -> bool:
    """Whether every non-empty cell is a number."""
    filled = [cell.strip() for cell in cells if cell.strip()]
    return bool(filled) and all(
        cell[0].isdigit() or cell[0] in "+-–∞" or cell == "nan" for cell in filled
    )


def terminal_width() -> int:
    """Columns of the terminal; 100 without one."""
    return shutil.get_terminal_size((100, 24)).columns


def cell(value: Any) -> str:
    """A value as a table shows it; empty for None."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)
