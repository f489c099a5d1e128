"""An inspection as plots; they are drawn where matplotlib is installed."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import matplotlib as mpl
import matplotlib.ticker
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from tachyscope.io.results import Document
from tachyscope.measure.inspection.stats import ALIKE, NAMES, PERCENTS
from tachyscope.measure.inspection.timing import PARTS


def draw(document: Document) -> Iterator[tuple[str, bytes]]:
    """The plots, each as PNG and as SVG: a file's name and its bytes."""
    with mpl.rc_context(STYLE):
        for name, figure_of in DRAWN.items():
            figure = figure_of(document)
            for ending in ("png", "svg"):
                nothing = {"Date": None} if ending == "svg" else None
                drawn = io.BytesIO()
                figure.savefig(drawn, format=ending, dpi=160, metadata=nothing)
                yield f"{name}.{ending}", drawn.getvalue()


INK, SOFT, GRID = "#24272c", "#555b64", "#e3e3e3"
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "tachyscope",  # else two plots of one document differ
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.parse_math": False,
    "text.color": INK,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": SOFT,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "grid.color": GRID,
    "legend.frameon": False,
}
# of Okabe and Ito, who chose them for every kind of colour vision
HUES = {
    "mlp": "#d55e00", "attention": "#0072b2", "prompt": "#009e73", "rest": "#c4c4c4",
    "query": "#0072b2", "key": "#009e73", "key_rotated": "#cc79a7",
}  # fmt: skip
# marks and hatches, so that colour is never the only difference
MARKS = {"mlp": "o", "query": "s", "key": "^", "key_rotated": "D"}
HATCHES = {"mlp": "", "attention": "///", "prompt": "...", "rest": ""}


def _titled(document: Document, what: str, size: tuple[float, float]) -> Figure:
    row = document["rows"][0]
    room = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.04, hspace=0.06)
    figure = Figure(size, layout=room)
    figure.suptitle(
        f"{what}: {row['model']}, {row['size']}", x=0.015, ha="left", fontsize=12.5,
        fontweight="bold",
    )  # fmt: skip
    return figure


def _draw_time(document: Document) -> Figure:
    """Two stacks over context: the clock's shares, and the counted work's beside them."""
    figure = _titled(document, "Where the time goes", (10, 4.2))
    rows = document["time"]
    x = np.array([row["context"] for row in rows])
    width = 0.88 * float(np.diff(x).min()) if len(x) > 1 else 1.0
    parts = [part for part in PARTS if any(row[f"work_{part}"] for row in rows)]
    titles = {"time": "share of the time", "work": "share of the counted work (multiply-adds)"}
    for axes, (measure, title) in zip(
        figure.subplots(1, 2, sharey=True), titles.items(), strict=True
    ):
        floor = np.zeros(len(x))
        for part in parts:
            y = np.array([row[f"{measure}_{part}"] for row in rows])
            axes.bar(
                x, y, width, floor, color=HUES[part], hatch=HATCHES[part], edgecolor="white",
                linewidth=0, label=NAMES[part],
            )  # fmt: skip
            floor += y
        axes.set_title(title)
        axes.set_xlabel("keys that a query sees, mean of a chunk")
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(mpl.ticker.PercentFormatter(1))
        if len(x) < 6:
            axes.set_xticks(x, [f"{value:.0f}" for value in x])
    shown = axes.get_legend_handles_labels()
    figure.legend(*(part[::-1] for part in shown), loc="outside right center")
    return figure


def _draw_alike(document: Document) -> Figure:
    """Cosine and difference by layer, cosine by latent frame, and by pass where there are some."""
    figure = _titled(document, "How alike adjacent frames are, place by place", (11.5, 7.2))
    (by_layer, apart), (by_frame, other) = figure.subplots(2, 2)
    row, layers = document["rows"][0], document["layers"]
    kinds = [kind for kind in ALIKE if f"{kind}_cosine" in row]
    _curves(by_layer, layers, "layer", kinds, "cosine")
    # a band for each would be a fog
    x, low = _points(layers, "layer", "mlp_cosine_p5")
    high = _points(layers, "layer", "mlp_cosine_p95")[1]
    by_layer.fill_between(
        x, low, high, color=HUES["mlp"], alpha=0.13, linewidth=0, label="MLP, 5 to 95 %"
    )
    for kind in kinds:
        x, y = _points(layers, "layer", f"{kind}_elsewhere")
        name = "another place" if kind == "mlp" else None
        by_layer.plot(x, y, ":", color=HUES[kind], linewidth=1.4, label=name)
    _curves(apart, layers, "layer", kinds, "difference")
    _curves(by_frame, document["frames"], "frame", kinds, "cosine")
    given, last = row["given"], document["passes"][-1]["pass"]
    of_frame, grey = "latent frame, held against the one before", "; grey: given frames"
    framed, cosines = [by_frame], [by_layer, by_frame]
    if last:
        _curves(other, document["passes"], "pass", kinds, "cosine")
        other.set_title(f"cosine by pass; {last} is the clean one")
        cosines.append(other)
    else:  # a single pass makes no curve
        _curves(other, document["frames"], "frame", kinds, "difference")
        other.set_title("difference by latent frame")
        framed.append(other)
    if given > 1:
        for axes in framed:
            left, right = axes.get_xlim()
            axes.axvspan(left, given - 0.5, color="#efefef", linewidth=0, zorder=0)
            axes.set_xlim(left, right)
    by_layer.set_title("cosine by layer")
    apart.set_title("difference by layer; at 1 the old is no nearer than nothing")
    by_frame.set_title("cosine by latent frame" + (grey if given > 1 else ""))
    for axes in (by_layer, apart):
        axes.set_xlabel("layer")
    other.set_xlabel("pass over a chunk" if last else of_frame)
    by_frame.set_xlabel(of_frame)
    for axes in (by_layer, apart, by_frame, other):
        if axes in cosines:
            axes.set_ylim(min(0.0, axes.get_ylim()[0]), 1.03)
            axes.set_ylabel("cosine")
        else:
            axes.set_ylim(0, max(1.03, 1.05 * axes.get_ylim()[1]))
            axes.set_ylabel("|old − new| / |new|")
        axes.xaxis.set_major_locator(mpl.ticker.MaxNLocator(integer=True))
    figure.legend(*by_layer.get_legend_handles_labels(), loc="outside right center")
    return figure


def _points(rows: Sequence[Document], axis: str, key: str) -> tuple[list[int], list[float]]:
    there = [row for row in rows if key in row]
    return [row[axis] for row in there], [row[key] for row in there]


def _curves(
    axes: Axes, rows: Sequence[Document], axis: str, kinds: Sequence[str], aspect: str
) -> None:
    for kind in kinds:
        x, y = _points(rows, axis, f"{kind}_{aspect}")
        axes.plot(
            x, y, color=HUES[kind], marker=MARKS[kind], markersize=4.5, linewidth=1.7,
            label=NAMES[kind],
        )  # fmt: skip
    axes.grid(axis="y")


def _draw_mass(document: Document) -> Figure:
    """Mass over the share of keys, a line a layer; and the strongest tenth's by layer and frame."""
    figure = _titled(document, "Where the attention lies", (11.5, 4.6))
    curves, cells = figure.subplots(1, 2)
    row, layers = document["rows"][0], document["layers"]
    colours = mpl.colormaps["cividis"]
    top = max(layers[-1]["layer"], 1)
    for part in layers:
        y = [part[f"mass_{p}"] for p in PERCENTS]
        curves.plot(PERCENTS, y, color=colours(0.85 * part["layer"] / top), linewidth=1.3)
    _mean_curve(curves, row, "mass", "mean of the layers", INK, "solid")
    if "prompt_mass_5" in row:
        _mean_curve(curves, row, "prompt_mass", "of the prompt's tokens", "#d55e00", (0, (5, 2)))
    curves.plot(PERCENTS, [p / 100 for p in PERCENTS], color=SOFT, linestyle=(0, (1, 2)),
                linewidth=1.2, label="if all keys weighed the same")  # fmt: skip
    curves.plot(*REPORTED, "x", color="#cc79a7", markersize=9, markeredgewidth=2.4, linestyle="",
                label="FAST-AR on Rolling-Forcing", zorder=5)  # fmt: skip
    curves.set_xscale("log")
    curves.set_xticks(PERCENTS, ["" if p == 75 else str(p) for p in PERCENTS])
    curves.minorticks_off()
    curves.set_xlim(1, 100)
    curves.set_ylim(0, 1.02)
    curves.yaxis.set_major_formatter(mpl.ticker.PercentFormatter(1))
    curves.grid()
    curves.set_xlabel("strongest keys read, % of those a query sees")
    curves.set_ylabel("attention mass they hold")
    curves.set_title("a line a layer, dark to light: first to last")
    figure.legend(*curves.get_legend_handles_labels(), loc="outside lower left", ncols=4)
    frames = sorted({part["frame"] for part in document["cells"]})
    grid = np.full((top + 1, len(frames)), np.nan)
    for part in document["cells"]:
        if f"mass_{SHOWN}" in part:
            grid[part["layer"], frames.index(part["frame"])] = part[f"mass_{SHOWN}"]
    box = (frames[0] - 0.5, frames[-1] + 0.5, -0.5, grid.shape[0] - 0.5)
    image = cells.imshow(
        grid, cmap="cividis", vmin=0, vmax=1, origin="lower", aspect="auto", extent=box
    )
    cells.set_xlabel("latent frame")
    cells.set_ylabel("layer")
    cells.set_title(f"mass in the strongest {SHOWN} % of the keys")
    for axis in (cells.xaxis, cells.yaxis):
        axis.set_major_locator(mpl.ticker.MaxNLocator(integer=True))
    bar = figure.colorbar(image, ax=cells, format=mpl.ticker.PercentFormatter(1))
    bar.outline.set_visible(False)
    return figure


REPORTED = ([30], [0.85])  # FAST-AR's own measure: the strongest 30 % held about 85 %
SHOWN = 10  # percent of the keys, in the map of layers and frames


def _mean_curve(
    axes: Axes, row: Document, kind: str, name: str, colour: str, stroke: Any
) -> None:  # fmt: skip
    y = [row[f"{kind}_{p}"] for p in PERCENTS]
    axes.plot(PERCENTS, y, color=colour, linestyle=stroke, linewidth=2.4, label=name)


DRAWN: dict[str, Callable[[Document], Figure]] = {
    "time": _draw_time,
    "similarity": _draw_alike,
    "mass": _draw_mass,
}
