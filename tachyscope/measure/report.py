"""A report as one HTML file, without network access: what was run, what it saved, what it cost."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

from tachyscope.io.files import write_atomically
from tachyscope.measure.chart import COLOURS, Curve, chart
from tachyscope.measure.page import (
    facts_of,
    html_facts,
    html_page,
    html_section,
    html_table,
    html_text,
    html_video,
)
from tachyscope.measure.runs import Line, Run, decibels, number, percent, sums, times

# above this two pictures look the same: the axis ends here
SAME_DB = 60.0


def write_report(
    path: str | os.PathLike[str],
    title: str,
    runs: Sequence[Run],
    results: Mapping[str, Any],
    *,
    model: str,
    video: bytes | None = None,
) -> Path:
    """Write the report of some runs, the baseline first, as one self-contained HTML file.

    `results` is their results document: its `aa` is the range of the baseline's speed against
    itself, its `lead` the verdict in a few sentences, its `speed` how much faster than it happened
    the video shows the runs. `video` is a whole mp4.
    """
    aa = results.get("aa")
    noise = None if aa is None else (aa["low"], aa["high"])
    names = ", ".join(run.name for run in runs)
    shown = "" if video is None else html_video(video, f"{names}, side by side")
    speed = results.get("speed", 1.0)
    clock = "by each run's own clock" + (f", {number(speed)} times as fast" if speed > 1 else "")
    body = [
        _tiles(runs),
        shown and html_section(f"Side by side, {clock}", shown),
        results["lead"] and html_section("In words", html_text(results["lead"])),
        _numbers(runs, noise),
        _plots(runs),
        _facts(model, results, runs),
    ]
    return write_atomically(path, html_page(title, "", body))


def _tiles(runs: Sequence[Run]) -> str:
    """The few most important numbers of every run but the baseline, in large letters."""
    tiles = []
    for i, run in enumerate(runs[1:], 1):
        stats, base = run.summary, runs[0].summary
        shown: list[tuple[str, str, str]] = []
        for key in ("ratio_dense", "ratio_first"):
            if key in stats:
                unclear = "" if stats.get("real") else ", within noise"
                rate = number(stats.get("fps_steady", stats["fps_avg"]))
                shown.append((times(stats[key]), f"the speed of {runs[0].name}{unclear}", rate))
        if "cache_mb" in stats and "cache_mb" in base:
            held = f"{number(stats['cache_mb'])} MB"
            theirs = f"cache; {runs[0].name} {number(base['cache_mb'])} MB"
            ram = f"+ {number(stats['host_mb'])} MB in RAM" if stats.get("host_mb") else ""
            shown.append((held, theirs, ram))
        if "surfaces_right" in stats:
            theirs = f"of surfaces right; {runs[0].name} {percent(base['surfaces_right'])}"
            shown.append((percent(stats["surfaces_right"]), theirs, ""))
        if "psnr_truth" in stats:
            theirs = f"to the truth; {runs[0].name} {decibels(base['psnr_truth'])}"
            shown.append((decibels(stats["psnr_truth"]), theirs, ""))
        elif near := next((stats[k] for k in ("psnr_dense", "psnr_first") if k in stats), None):
            shown.append((decibels(near), f"PSNR to {runs[0].name}", ""))
        if not shown:
            continue
        cells = "".join(
            f"<div><strong>{escape(large)}</strong>{escape(words)}"
            f"{f'<br>{escape(_rate(more))}' if more else ''}</div>"
            for large, words, more in shown
        )
        tiles.append(f'<h2>{_swatch(i)}{escape(run.name)}</h2><div class="tiles">{cells}</div>')
    return f"<section>{''.join(tiles)}</section>" if tiles else ""


def _rate(more: str) -> str:
    return more if more.startswith("+") else f"{more} frames/s"


def _swatch(index: int) -> str:
    return f'<i class="swatch" style="--run: var(--run-{index % COLOURS})"></i>'


def _numbers(runs: Sequence[Run], noise: tuple[float, float] | None) -> str:
    aside = f'<p class="aside">{escape(_noise(noise))}</p>' if len(runs) > 1 else ""
    every = _table(runs, _everything(runs), "Every number of the summaries")
    return html_section(
        "Numbers",
        _table(runs, sums(runs, noise), "Sums of each run"),
        f"{aside}<details><summary>Every number of the summaries</summary>{every}</details>",
    )


def _table(runs: Sequence[Run], lines: Sequence[Line], label: str) -> str:
    heads = [f"{_swatch(i)}{escape(run.name)}" for i, run in enumerate(runs)]
    rows = {
        f"{escape(line.name)} <small>{escape(line.meaning)}</small>": [
            _cell(*x) for x in line.cells
        ]
        for line in lines
    }
    return html_table(heads, rows, label)


def _cell(shown: str, remark: str) -> str:
    value = escape(shown) if shown else '<span class="none">–</span>'
    return f"{value}{f' <small>{escape(remark)}</small>' if remark else ''}"


def _facts(model: str, results: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """What was run, on what, and by which plans."""
    facts = {"Model": escape(model), **facts_of(results)}
    for i, run in enumerate(runs):
        notes = "".join(f'<span class="note">{escape(note)}</span>' for note in run.notes)
        facts[f"{_swatch(i)}{escape(run.name)}"] = f"<code>{escape(run.plan)}</code>{notes}"
    return html_section("What was run", html_facts(facts))


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
class _Plot:
    title: str
    caption: str
    svg: str


def _plots(runs: Sequence[Run]) -> str:
    plots = [_progress(runs), _time(runs), _cache(runs), *_closeness(runs)]
    shown = [plot for plot in plots if plot is not None]
    if not shown:
        return ""
    figures = "\n".join(
        f"<figure><h3>{escape(plot.title)}</h3>{plot.svg}"
        f"<figcaption>{escape(plot.caption)}</figcaption></figure>"
        for plot in shown
    )
    names = " ".join(f"<span>{_swatch(i)}{escape(run.name)}</span>" for i, run in enumerate(runs))
    return (
        f'<section><h2>Over the video</h2><p class="legend">{names}</p>\n'
        f'<div class="plots">\n{figures}\n</div></section>'
    )


def _progress(runs: Sequence[Run]) -> _Plot | None:
    """Frames over the time of each run's own clock; the other plots are over frames."""
    timed = [
        (i, run)
        for i, run in enumerate(runs)
        if run.rows and all(math.isfinite(row.get("wall_ms", math.nan)) for row in run.rows)
    ]
    curves = [
        Curve(
            i,
            run.name,
            [0.0, *accumulate(row["wall_ms"] / 1e3 for row in run.rows)],
            [0.0, *accumulate(row.get("frames", 1) for row in run.rows)],
        )
        for i, run in timed
    ]
    if len(curves) < 2:
        return None
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


def _closeness(runs: Sequence[Run]) -> list[_Plot]:
    plots = []
    for key, title in (("psnr_truth", "truth"), ("psnr_dense", "dense"), ("psnr_first", "first")):
        curves = [curve.map(lambda y: min(y, SAME_DB)) for curve in _curves(runs, key)]
        if not curves:
            continue
        caption = f"Mean of each chunk; {SAME_DB:g} dB and more are drawn as {SAME_DB:g}."
        plots.append(_plot(f"PSNR to {title}", "dB", curves, caption, SAME_DB + 3))
    return plots


def _curves(runs: Sequence[Run], key: str) -> list[Curve]:
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
            curves.append(Curve(i, run.name, [x for x, _ in points], [y for _, y in points]))
    return curves


def _plot(
    title: str,
    unit: str,
    curves: Sequence[Curve],
    caption: str,
    top: float,
    across: str = "frames",
) -> _Plot:
    ends = [f"{c.name} from {number(c.y[0])} to {number(c.y[-1])}" for c in curves]
    title = f"{title}, {unit}"
    words = f"{title}, over {across}: {'; '.join(ends)}."
    return _Plot(title, caption, chart(curves, top, across, words))
