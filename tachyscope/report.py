"""One HTML file that tells what was run, what it saved and what that cost; it needs no network."""

from __future__ import annotations

import base64
import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import jinja2
import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tachyscope.files import write_atomically
from tachyscope.runs import Line, Run, number, sums, times

Floor = Mapping[str, Any]  # `db`, and `horizon`: None where two dense runs did not part

# above this two pictures look the same, and the axis is better spent below
SAME_DB = 60.0


def write_report(
    path: str | os.PathLike[str],
    title: str,
    runs: Sequence[Run],
    results: Mapping[str, Any],
    *,
    model: str,
    video: bytes | None = None,
    by_clock: bool = False,
) -> Path:
    """Write the report of some runs, the baseline first, as one self-contained HTML file.

    `results` is their results document: its `aa` is the range of the baseline's speed against
    itself, its `floor` up to which frame and above how many dB closeness to the dense run means
    anything, its `lead` the verdict in a few sentences. `video` is a whole mp4.
    by_clock: also draw frames against each run's clock, as its rows' `wall_ms` tell it.
    """
    floor, aa = results.get("floor"), results.get("aa")
    noise = None if aa is None else (aa["low"], aa["high"])
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html").render(
        title=title,
        lead=results["lead"],
        facts=_facts(model, results),
        horizon=_horizon(floor) if any("psnr_dense" in run.summary for run in runs) else "",
        noise=_noise(noise) if len(runs) > 1 else "",
        runs=runs,
        light=LIGHT,
        dark=DARK,
        table=sums(runs, noise),
        everything=_everything(runs),
        plots=[*([_progress(runs)] if by_clock else []), *_plots(runs, floor)],
        video=None if video is None else base64.b64encode(video).decode(),
    )
    return write_atomically(path, page)


def _facts(model: str, results: Mapping[str, Any]) -> dict[str, str]:
    machine, units = (
        results["machine"],
        {"cores": "cores", "memory_gb": "GB", "gpu_memory_gb": "GB"},
    )
    parts = [f"{v} {units.get(k, '')}".strip() for k, v in machine.items() if v is not None]
    if "gpu" in machine and machine["gpu"] is None:
        parts.append("no GPU")
    return {
        "Model": model,
        "Date": results["date"],
        "Machine": ", ".join(parts),
        "Versions": ", ".join(f"{name} {version}" for name, version in results["versions"].items()),
        "Command": results["command"],
    }


def _horizon(floor: Floor | None) -> str:
    if floor is None:
        return "Not measured: how far closeness to the dense run can be trusted is unknown."
    if floor["horizon"] is None:
        return (
            f"All frames count: two dense runs of different precision stay above "
            f"{floor['db']:g} dB PSNR to each other."
        )
    return (
        f"Frame {floor['horizon']}: from there on two dense runs of different precision are below "
        f"{floor['db']:g} dB PSNR to each other, and PSNR to dense says nothing about quality."
    )


def _noise(noise: tuple[float, float] | None) -> str:
    if noise is None:
        return "The baseline was not timed against itself: a ratio may be noise."
    low, high = noise
    return (
        f"The baseline timed against itself gave {times(low)} to {times(high)}; "
        "a ratio in that range is no speed-up."
    )


def _everything(runs: Sequence[Run]) -> list[Line]:
    keys = dict.fromkeys(key for run in runs for key in run.summary)
    shown = [[number(run.summary[k]) if k in run.summary else "" for run in runs] for k in keys]
    return [Line(k, "", [(v, "") for v in vs]) for k, vs in zip(keys, shown, strict=True)]


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of the plots for a light or a dark page; `runs` are taken in turn."""

    ink: str
    soft: str  # labels, axes
    line: str  # grid
    runs: tuple[str, ...]


LIGHT = Theme(
    "#24272c", "#666b73", "#e4e1d9",
    ("#6b7280", "#0f7f86", "#c2571a", "#6d4fc4", "#a3234f", "#4d7c0f", "#8a6100"),
)  # fmt: skip
DARK = Theme(
    "#e6e3dc", "#a3a6ab", "#33373d",
    ("#a3a9b4", "#4fc3c9", "#f0955a", "#ac97f0", "#ee7fa2", "#a3cf5f", "#dcb457"),
)  # fmt: skip
# of lines, so that colour is never the only difference
STROKES = ("solid", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 2, 1, 2)))


@dataclass(frozen=True, slots=True)
class _Plot:
    title: str
    caption: str
    alt: str
    light: str  # SVG in base64
    dark: str


@dataclass(frozen=True, slots=True)
class _Curve:
    index: int  # of its run
    name: str
    x: list[float]
    y: list[float]

    def map(self, change: Callable[[float], float]) -> _Curve:
        return replace(self, y=[change(value) for value in self.y])


def _plots(runs: Sequence[Run], floor: Floor | None) -> list[_Plot]:
    plots = [_time(runs), _cache(runs), _closeness(runs, floor)]
    return [plot for plot in plots if plot is not None]


def _progress(runs: Sequence[Run]) -> _Plot:
    """Frames against each run's own clock: the only plot that is not over frames."""
    curves = [
        _Curve(
            i,
            run.name,
            [0.0, *accumulate(row["wall_ms"] / 1e3 for row in run.rows)],
            [0.0, *accumulate(row["frames"] for row in run.rows)],
        )
        for i, run in enumerate(runs)
    ]
    top = 1.12 * max(curve.y[-1] for curve in curves)
    caption = "Frames made, by each run's own clock."
    return _plot("Frames over time", "frames", curves, caption, top, across="seconds")


def _time(runs: Sequence[Run]) -> _Plot | None:
    curves, unit = _curves(runs, "wall_ms"), "ms"
    if not curves:
        return None
    # a first chunk that warms up would flatten all the others
    top = 1.12 * max(max(curve.y[1:] or curve.y) for curve in curves)
    if top >= 2000:
        unit, top = "s", top / 1e3
        curves = [curve.map(lambda value: value / 1e3) for curve in curves]
    caption = "Each chunk, from its first pass to its last decoded frame."
    high = [value for curve in curves for value in curve.y if value > top]
    if high:
        chunks = "one chunk lies" if len(high) == 1 else f"{len(high)} chunks lie"
        caption += f" ▲ {chunks} above the axis, at most {number(max(high))} {unit}."
    return _plot("Time of a chunk", unit, curves, caption, top)


def _cache(runs: Sequence[Run]) -> _Plot | None:
    curves = _curves(runs, "cache_mb")
    if not curves:
        return None
    top = 1.12 * max(max(curve.y) for curve in curves)
    return _plot("Cache", "MB", curves, "In use after each chunk, all layers.", top)


def _closeness(runs: Sequence[Run], floor: Floor | None) -> _Plot | None:
    curves = [curve.map(lambda y: min(y, SAME_DB)) for curve in _curves(runs, "psnr_dense")]
    if not curves:
        return None
    caption = f"Mean of each chunk; {SAME_DB:g} dB and more are drawn as {SAME_DB:g}."
    return _plot("PSNR to dense", "dB", curves, caption, SAME_DB + 3, floor)


def _curves(runs: Sequence[Run], key: str) -> list[_Curve]:
    """Of every run that has the key: frames made by each chunk's end, and the finite values."""
    curves = []
    for i, run in enumerate(runs):
        ends = accumulate(row.get("frames", 1) for row in run.rows)
        points = [
            (end, row[key])
            for end, row in zip(ends, run.rows, strict=True)
            if math.isfinite(row.get(key, math.nan))
        ]
        if points:
            curves.append(_Curve(i, run.name, [x for x, _ in points], [y for _, y in points]))
    return curves


def _plot(
    title: str,
    unit: str,
    curves: Sequence[_Curve],
    caption: str,
    top: float,
    floor: Floor | None = None,
    across: str = "frames",
) -> _Plot:
    ends = [f"{c.name} from {number(c.y[0])} to {number(c.y[-1])}" for c in curves]
    title = f"{title}, {unit}"
    alt = f"{title}, over {across}: {'; '.join(ends)}."
    light, dark = (_picture(theme, curves, top, floor, across) for theme in (LIGHT, DARK))
    return _Plot(title, caption, alt, light, dark)


def _picture(
    theme: Theme, curves: Sequence[_Curve], top: float, floor: Floor | None, across: str
) -> str:
    """The curves as SVG, in base64."""
    with mpl.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "tachyscope",  # else two reports of one run differ
            "font.family": "DejaVu Sans",
            "font.size": 9.5,
            "text.parse_math": False,
            "text.color": theme.ink,
            "axes.labelcolor": theme.soft,
            "xtick.color": theme.soft,
            "ytick.color": theme.soft,
        }
    ):
        figure = Figure((4.6, 3.2), layout="constrained")
        axes = figure.subplots()
        for curve in curves:
            colour = theme.runs[curve.index % len(theme.runs)]
            axes.plot(
                curve.x, curve.y, color=colour, label=curve.name, linewidth=1.7,
                linestyle=STROKES[curve.index % len(STROKES)],
                marker="o" if len(curve.x) == 1 else None,
            )  # fmt: skip
            over = [x for x, y in zip(curve.x, curve.y, strict=True) if y > top]
            axes.plot(over, [0.97 * top] * len(over), "^", color=colour, markersize=5)
        axes.set_ylim(0, top or 1)
        axes.set_xlim(left=0)
        if floor is not None:
            _draw_floor(axes, floor, theme)
        axes.set_xlabel(across)
        axes.grid(axis="y", color=theme.line, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        axes.spines[["left", "right", "top"]].set_visible(False)
        axes.spines["bottom"].set_color(theme.line)
        columns = 3 if max(len(curve.name) for curve in curves) <= 12 else 1
        figure.legend(loc="outside upper left", ncols=columns, frameon=False, handlelength=2)
        file = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    # the browser's own letters; the ones named above only measure
    text = text[text.index("<svg") :].replace("'DejaVu Sans'", "system-ui, sans-serif")
    return base64.b64encode(text.encode()).decode()


def _draw_floor(axes: Axes, floor: Floor, theme: Theme) -> None:
    style: dict[str, Any] = {"color": theme.soft, "linestyle": (0, (1, 2)), "linewidth": 1.2}
    words: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9, "color": theme.soft}
    axes.axhline(floor["db"], **style)
    axes.annotate("floor", (0, floor["db"]), xytext=(3, 3), **words)
    if floor["horizon"] is not None:
        axes.axvline(floor["horizon"], **style)
        axes.annotate("horizon", (floor["horizon"], 0), xytext=(4, 4), **words)
