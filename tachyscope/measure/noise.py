"""A clock's own noise, and ratios that must first lie outside it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tachyscope.io.results import Document


def noise(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """The widest ratio, taken both ways, between times of equal runs."""
    high = max(max(a, b) / min(a, b) for a, b in zip(first, second, strict=True))
    return 1 / high, high


def verdict(ratios: Sequence[float], aa: tuple[float, float]) -> Document:
    """A ratio's median and range, and whether all of it lies outside the noise on one side.

    Fewer than three ratios show no range, so that they are never real.
    """
    low, high = min(ratios), max(ratios)
    return {
        "ratio_dense": statistics.median(ratios),
        "ratio_dense_low": low,
        "ratio_dense_high": high,
        "real": len(ratios) >= 3 and (low > aa[1] or high < aa[0]),
    }


def speed_word(row: Mapping[str, Any]) -> str:
    """Whether a row's ratio is a speed-up or a slow-down; no verdict where a round is in noise."""
    if not row["real"]:
        return "no verdict"
    return "faster" if row["ratio_dense"] > 1 else "slower"
