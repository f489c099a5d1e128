"""Finished runs, and their measures side by side, in a terminal and for a report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tachyscope.io.tables import format_table


@dataclass(frozen=True, slots=True)
class Run:
    """One rollout: its name, its plan spelled out, the meter's rows and their summary.

    Of a row the plots read `frames`, `wall_ms`, `cache_mb` and `psnr_dense`, where present.
    """

    name: str
    plan: str
    rows: Sequence[Mapping[str, float]]
    summary: Mapping[str, float]
    notes: Sequence[str] = ()  # such as that a method saved nothing

    def row(self, model: str, size: str, **more: Any) -> dict[str, Any]:
        """The run in a results document."""
        named = {"name": self.name, "plan": self.plan, "model": model, "size": size}
        return named | more | dict(self.summary) | {"notes": list(self.notes)}


@dataclass(frozen=True, slots=True)
class Measure:
    """A row of the table: the summary's key, its name, its format, and its meaning."""

    key: str
    name: str
    write: Callable[[float], str]
    meaning: str


class Line(NamedTuple):
    """A line of the table: a measure's name, its meaning, and a cell a run."""

    name: str
    meaning: str
    cells: list[tuple[str, str]]  # a value, and a remark on it


def number(value: float) -> str:
    """Three significant digits, whole numbers in full, thousands separated; NaN is a dash."""
    if not math.isfinite(value):
        return "∞" if value == math.inf else "–"
    if value and not 1e-5 <= abs(value) < 1e9:
        return f"{value:.2e}"
    if value == round(value) or abs(value) >= 1000:
        return f"{value:,.0f}".replace(",", "\u202f")
    return f"{value:.{2 - math.floor(math.log10(abs(value)))}f}"


def percent(value: float) -> str:
    return f"{number(100 * value)} %" if math.isfinite(value) else "–"


def times(value: float) -> str:
    return f"{value:.2f}×" if math.isfinite(value) else "–"


def decibels(value: float) -> str:
    return f"{value:.1f} dB" if math.isfinite(value) else "–"


# the rows of the table, shown if they say something
MEASURES = (
    Measure("fps_steady", "Frames/s once warm", number, "by the clock, chunks after the warm-up"),
    Measure("fps_end", "Frames/s at the end", number, "by the clock, the last chunks"),
    Measure("fps_avg", "Frames/s on average", number, "by the clock, warm-up included"),
    Measure("ratio_dense", "Speed to dense once warm", times, "dense’s time over this one’s"),
    Measure("ratio_dense_all", "Speed to dense, whole video", times, "warm-up included"),
    Measure("ratio_first", "Speed to the first once warm", times, "its time over this one’s"),
    Measure("ratio_first_all", "Speed to the first, whole video", times, "warm-up included"),
    Measure("steady_ms", "A chunk, ms", number, "by the clock, median once warm"),
    Measure("p99_ms", "99 % of chunks within, ms", number, "p99; of fewer than 100 the longest"),
    Measure("recompiled", "Programs compiled once warm", number, "each stalls a chunk"),
    Measure("model_ms", "A chunk in the model, ms", number, "of that; decoding is the rest"),
    Measure("first_frame_s", "First frame after, s", number, "decoded, given frames being read"),
    Measure("open_s", "Reading given frames, s", number, "prompt and given frames, by this plan"),
    Measure("warm_s", "Warm-up, s", number, "kernels are compiled, the cache fills"),
    Measure("cache_mb", "Cache, MB", number, "in use at the end, all layers"),
    Measure("host_mb", "In RAM, MB", number, "of a bank, reserved for the whole video"),
    Measure("peak_gb", "GPU memory, GB", number, "at most, weights included"),
    Measure("promised_gb", "GPU memory promised, GB", number, "before the run"),
    Measure("ram_gb", "RAM of the process, GB", number, "at most, after loading"),
    Measure("promised_ram_gb", "RAM promised, GB", number, "before the run"),
    Measure("density", "Pairs scored, % of dense", percent, "query-key pairs of attention"),
    Measure("macs", "Counted GMACs", lambda v: number(v / 1e9), "linears and attention"),
    Measure("passes_skipped", "Passes skipped", number, "of the denoising passes"),
    Measure("rows_computed", "MLP rows computed", number, "rows the MLPs really saw"),
    Measure("rows_replayed", "MLP rows replayed", number, "rows taken from the frame before"),
    Measure("psnr_truth", "PSNR to truth", decibels, "against the world itself"),
    Measure("surfaces_right", "Surfaces right", percent, "walls, floor and things in view"),
    Measure("psnr_dense", "PSNR to dense", decibels, "mean over frames, at most 100 dB"),
    Measure("psnr_first", "PSNR to the first", decibels, "mean over frames, at most 100 dB"),
    Measure("sharpness", "Sharpness", times, "detail, relative to the first run’s"),
    Measure("motion", "Motion", number, "mean change from frame to frame, in levels of 255"),
    Measure("frozen_frames", "Frozen frames", number, "moving less than 0.1 level"),
    Measure("flat_frames", "Flat frames", number, "with a contrast below 2 levels"),
)


def sums(runs: Sequence[Run], noise: tuple[float, float] | None = None) -> list[Line]:
    """The measures that are not 0 in all runs, and not equal in all of several runs.

    noise: the range of the first run's speed to itself (A/A).
    """
    lines = []
    for measure in MEASURES:
        # the baseline has no ratio to itself
        cells = [_cell(measure, run, noise if i else None) for i, run in enumerate(runs)]
        words = {shown for shown, _ in cells}
        if words - {"", "0"} and (len(runs) == 1 or len(words) > 1):
            lines.append(Line(measure.name, measure.meaning, cells))
    return lines


def _cell(measure: Measure, run: Run, noise: tuple[float, float] | None) -> tuple[str, str]:
    value = run.summary.get(measure.key)
    simulated = run.summary.get(f"simulated_{measure.key}")
    # a simulated saving is shown only if there is no real one beside it
    if simulated and not value:
        return measure.write(simulated), "simulated"
    if value is None:
        return "", ""
    inside = noise is not None and noise[0] <= value <= noise[1]
    # `real` is false if a total is outside the noise, but not every round is
    unclear = measure.key.startswith("ratio_") and (inside or run.summary.get("real") is False)
    return measure.write(value), "within noise" if unclear else ""


def run_lines(runs: Sequence[Run]) -> list[str]:
    """The runs' measures side by side, then their plans and notes."""
    rows = [[line.name, *(" ".join(cell).strip() for cell in line.cells)] for line in sums(runs)]
    out = format_table(["", *(run.name for run in runs)], rows)
    for run in runs:
        out += [f"{run.name}: {text}" for text in (run.plan, *run.notes)]
    return out
