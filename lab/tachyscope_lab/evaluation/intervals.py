"""Means over worlds, and how far they may be off."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tachyscope.io.results import Document

Values = dict[str, float]

# Student's t at 97.5 %, by degrees of freedom from 1
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179,
           2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064,
           2.060, 2.056, 2.052, 2.048, 2.045, 2.042)  # fmt: skip


# keys that begin so are of measures where more is better, as are dB and SSIM
BETTER = ("identity", "psnr_truth", "objects_new_place", "switch_follows")


def interval(values: Iterable[float]) -> tuple[float, float, float]:
    """Mean of what is a number, and its 95 % interval by Student's t; no interval of one value."""
    x = np.array([value for value in values if math.isfinite(value)])
    if len(x) == 0:
        return math.nan, math.nan, math.nan
    mean = float(x.mean())
    if len(x) == 1:
        return mean, math.nan, math.nan
    freedom = len(x) - 1
    t = STUDENT[freedom - 1] if freedom <= len(STUDENT) else 1.96 + 2.5 / freedom
    half = t * float(x.std(ddof=1)) / math.sqrt(len(x))
    return mean, mean - half, mean + half


def versus(a: Mapping[str, Any], b: Mapping[str, Any], key: str) -> tuple[float, float, float]:
    """By how much row a exceeds row b in `key`, world by world: mean and 95 % interval."""
    pairs = zip(a["by_world"][key], b["by_world"][key], strict=True)
    # a JSON file has null for a value that is no number
    return interval(x - y for x, y in pairs if x is not None and y is not None)


def mean(values: Iterable[float]) -> float:
    x = [float(value) for value in values if math.isfinite(value)]
    return sum(x) / len(x) if x else math.nan


def combined(results: Sequence[Values]) -> Document:
    """Means and intervals of the worlds' values, the worst world, and the values themselves.

    The worst is the lowest: of measures where more is better.
    """
    keys = list(dict.fromkeys(key for values in results for key in values))
    out: Document = {}
    by_world: dict[str, list[float]] = {}
    for key in keys:
        # a part that was kept in a file has null for a value that is no number
        known = [values.get(key) for values in results]
        by_world[key] = [math.nan if value is None else value for value in known]
        out[key], out[f"{key}_low"], out[f"{key}_high"] = interval(by_world[key])
        if (key.endswith(("_db", "_ssim")) or key.startswith(BETTER)) and "_band" not in key:
            finite = [value for value in by_world[key] if math.isfinite(value)]
            out[f"{key}_worst"] = min(finite, default=math.nan)
    return out | {"by_world": by_world}
