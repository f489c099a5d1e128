"""A clock's noise (A/A), and whether a ratio lies outside it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tachyscope.io.results import Document


def noise(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """The widest ratio between times of equal runs, as (1 / high, high)."""
    high = max(max(a, b) / min(a, b) for a, b in zip(first, second, strict=True))
    return 1 / high, high


def verdict(ratios: Sequence[float], aa: tuple[float, float]) -> Document:
    """The median and range of ratios; `real` if all lie outside the noise on one side.

    Fewer than three ratios are never real.
    """
    low, high = min(ratios), max(ratios)
    return {
        "ratio_dense": statistics.median(ratios),
        "ratio_dense_low": low,
        "ratio_dense_high": high,
        "real": len(ratios) >= 3 and (low > aa[1] or high < aa[0]),
    }


def speed_word(row: Mapping[str, Any]) -> str:
    """`faster` or `slower`; `no verdict` if a round is within noise."""
    if not row["real"]:
        return "no verdict"
    return "faster" if row["ratio_dense"] > 1 else "slower"
