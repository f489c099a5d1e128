"""Methods as points: what they keep or read against how good it is, and which are best."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tachyscope.io.results import Document
from tachyscope_lab.evaluation.rivals import TITLES

COSTS = {"cache_mb": "MB on the GPU, a video", "pairs_frame": "query-key pairs a frame"}
VALUES = {"revisit_db": "revisit, dB to the truth", "identity": "surfaces right"}
COLOURS = {"bytes": "#0f7f86", "pairs": "#c2571a", "published": "#6d4fc4", "long": "#6b7280"}
DRIFT = {"stretch_{}_db": "dB to the truth", "identity_stretch_{}": "surfaces right"}
LINES = ("#1d1d1f", "#0f7f86", "#c2571a", "#6d4fc4", "#b08900", "#6b7280")
MARKS = {"bytes": "o", "pairs": "s", "published": "^", "long": "D"}


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which points no other beats: none costs as little and is better, or less and as good."""
    return [
        i
        for i, (cost, value) in enumerate(points)
        if not any(
            other[0] <= cost and other[1] >= value and other != (cost, value) for other in points
        )
    ]


def draw(document: Document, folder: Path) -> list[Path]:
    """A figure for each pace and length of video, and of long ones their drift, as SVG and PNG; the
    files."""
    files: list[Path] = []
    rows = document["rows"]
    for pace, frames in dict.fromkeys((row["pace"], row["frames"]) for row in rows):
        some = [row for row in rows if (row["pace"], row["frames"]) == (pace, frames)]
        with mpl.rc_context({"svg.hashsalt": "tachyscope", "font.size": 8}):
            figure = Figure((12, 8), layout="constrained")
            plots = figure.subplots(len(VALUES), len(COSTS), squeeze=False)
            for line, value in zip(plots, VALUES, strict=True):
                for axes, cost in zip(line, COSTS, strict=True):
                    _draw(axes, some, cost, value)
            figure.suptitle(
                f"{some[0]['model']}, pace {pace:g}, {frames} frames, {some[0]['worlds']} rooms, "
                f"95 % intervals; the line joins what no other beats"
            )
            handles, names = plots[0][0].get_legend_handles_labels()
            figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False)
            key = [Line2D([], [], color=COLOURS[row["groups"][0]], marker="", lw=2) for row in some]
            named = [f"{number} {row['name']}" for number, row in enumerate(some, 1)]
            figure.legend(key, named, loc="outside right upper", frameon=False, handlelength=1)
            files += _save(figure, folder / f"rivals-pace{pace:g}-{frames}")
            long = [row for row in some if "long" in row["groups"]]
            if any(key.startswith("stretch_") for row in long for key in row):
                files += _save(_drift(long), folder / f"drift-pace{pace:g}-{frames}")
    return files


def _save(figure: Figure, path: Path) -> list[Path]:
    files = [path.with_name(f"{path.name}.{ending}") for ending in ("svg", "png")]
    for file, metadata in zip(files, ({"Date": None}, None), strict=True):
        figure.savefig(file, metadata=metadata)
    return files


def _drift(rows: Sequence[Document]) -> Figure:
    """What is right in each stretch of long videos, a line a method."""
    figure = Figure((10, 3.8), layout="constrained")
    rows = sorted(rows, key=lambda row: -row["identity"])  # the best is named first
    for axes, (key, label) in zip(figure.subplots(1, len(DRIFT)), DRIFT.items(), strict=True):
        head, tail = key.split("{}")
        for row, colour in zip(rows, cycle(LINES)):
            named = [k for k in row if k.startswith(head) and k.endswith(tail)]
            ends = sorted(
                int(x) for k in named if (x := k[len(head) :].removesuffix(tail)).isdigit()
            )
            middle = [(start + end) / 2 for start, end in pairwise([0, *ends])]
            values = [row[key.format(end)] for end in ends]
            axes.plot(middle, values, color=colour, marker="o", markersize=3, label=row["name"])
        axes.set_xlabel("frames made")
        axes.set_ylabel(label)
        axes.grid(color="#ececec", linewidth=0.6)
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", frameon=False)
    first = rows[0]
    figure.suptitle(
        f"{first['model']}, pace {first['pace']:g}, {first['worlds']} rooms, {first['runs']} runs"
    )
    return figure


def _draw(axes: Axes, rows: Sequence[Document], cost: str, value: str) -> None:
    points = [(row[cost], row[value]) for row in rows]
    front = sorted(points[i] for i in pareto(points))
    axes.plot([x for x, _ in front], [y for _, y in front], color="#b9b6ae", zorder=0)
    named = set[str]()
    for number, (row, (x, y)) in enumerate(zip(rows, points, strict=True), 1):
        group = row["groups"][0]
        low, high = row.get(f"{value}_low"), row.get(f"{value}_high")
        spread: Any = None if low is None or high is None else [[y - low], [high - y]]
        axes.errorbar(
            x, y, yerr=spread, fmt=MARKS[group], color=COLOURS[group], elinewidth=0.6, markersize=4,
            label=None if group in named else TITLES[group],
        )  # fmt: skip
        named.add(group)
        # numbers on both sides, since many stand at one cost
        left = number % 2 == 0
        axes.annotate(
            str(number), (x, y), xytext=(-5 if left else 5, 0), textcoords="offset points",
            ha="right" if left else "left", va="center", fontsize=6, color=COLOURS[group],
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlabel(COSTS[cost])
    axes.set_ylabel(VALUES[value])
    axes.grid(color="#ececec", linewidth=0.6)
