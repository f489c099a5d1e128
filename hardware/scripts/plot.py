"""Draws docs/hardware/engine.svg and docs/hardware/waves.svg; the waves are of a simulation."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "tachyscope"
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

from tachyscope_fpga.model import cycle_model  # noqa: E402
from tachyscope_fpga.parts.engine import Engine, Phase  # noqa: E402
from tachyscope_fpga.parts.gemv import GemvArray  # noqa: E402
from tachyscope_fpga.parts.tas_gate import TasGate  # noqa: E402
from tachyscope_fpga.tools.simulate import simulate  # noqa: E402
from tachyscope_fpga.tools.verify import Vectors  # noqa: E402

INK, SOFT, LOUD = "#1a1a1a", "#e8eef5", "#fbe3cf"


def box(
    axes: Any, x: float, y: float, width: float, height: float, text: str, color: str = SOFT
) -> None:
    axes.add_patch(plt.Rectangle((x, y), width, height, facecolor=color, edgecolor=INK, lw=1))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8.5)


def arrow(
    axes: Any, start: tuple[float, float], end: tuple[float, float], text: str = "", at: str = "top"
) -> None:
    axes.annotate(
        "",
        end,
        start,
        arrowprops={"arrowstyle": "-|>", "lw": 1, "color": INK, "shrinkA": 0, "shrinkB": 0},
    )
    if text:
        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        above = {"top": (0, 0.06, "center", "bottom"), "right": (0.06, 0, "left", "center")}[at]
        axes.text(
            middle[0] + above[0], middle[1] + above[1], text, ha=above[2], va=above[3], fontsize=7
        )


def diagram(path: Path) -> None:
    figure, axes = plt.subplots(figsize=(9.5, 4.6))
    axes.set_xlim(0, 12.4)
    axes.set_ylim(0, 6)
    axes.axis("off")
    box(axes, 2.0, 4.6, 1.7, 0.9, "TAS gate\ntas_gate.py")
    box(axes, 2.0, 2.9, 1.7, 0.9, "replay cache\nreplay_cache.py", LOUD)
    box(axes, 4.9, 3.7, 1.8, 0.9, "row scheduler\ndrs.py (a)", LOUD)
    for number in range(3):
        y = 4.7 - 1.25 * number
        box(
            axes,
            7.9,
            y,
            2.1,
            0.95,
            f"core {number if number < 2 else 'n'}  core.py\narray gemv.py\nrequant.py",
        )
    box(axes, 4.9, 0.5, 1.8, 0.9, "port scheduler\nports.py (b)", LOUD)
    box(axes, 7.9, 0.5, 2.1, 0.9, "memory ports\n32 x HBM")
    arrow(axes, (0.2, 5.2), (2.0, 5.2), "score: q, k")
    arrow(axes, (0.2, 4.8), (2.0, 4.8), "threshold")
    arrow(axes, (0.2, 3.35), (2.0, 3.35), "position")
    arrow(axes, (3.7, 5.05), (4.9, 4.4))
    axes.text(4.4, 4.85, "above?", fontsize=7)
    arrow(axes, (3.7, 3.6), (4.9, 3.95))
    axes.text(4.1, 3.95, "valid?", fontsize=7)
    arrow(axes, (4.9, 3.75), (3.7, 3.1), "", "top")
    axes.text(4.35, 3.2, "replays", fontsize=7, ha="left")
    for number in range(3):
        arrow(axes, (6.7, 4.15), (7.9, 5.15 - 1.25 * number))
        arrow(axes, (10.0, 5.15 - 1.25 * number), (11.0, 4.0), "")
    axes.text(6.95, 4.75, "jobs", fontsize=7)
    axes.plot([11.0, 11.0], [2.0, 5.2], color=INK, lw=3)
    arrow(axes, (11.0, 4.0), (12.2, 4.0))
    axes.text(11.15, 4.08, "o: row, tile, y", fontsize=7)
    axes.plot([2.85, 2.85, 11.0], [2.9, 2.0, 2.0], color=INK, lw=1)
    axes.text(4.6, 2.06, "replayed tiles out; computed tiles in", fontsize=7)
    arrow(axes, (4.0, 0.95), (4.9, 0.95), "")
    axes.text(3.95, 0.95, "verdict of every layer", fontsize=7, ha="right", va="center")
    arrow(axes, (6.7, 0.95), (7.9, 0.95), "fetch")
    arrow(axes, (8.95, 1.4), (8.95, 2.2), "weights", "right")
    figure.savefig(
        path, bbox_inches="tight", metadata={"Date": None} if path.suffix == ".svg" else None
    )
    plt.close(figure)


def waves(path: Path) -> None:
    """One token that is computed and, two steps later, one that is replayed."""
    engine = Engine(GemvArray(4, 4), 16, 16, TasGate(2, 8, 4), positions=1)
    vectors = next(
        drawn
        for seed in range(99)
        for drawn in [Vectors.draw(engine, 2, seed, share=1.0)]
        if [flags[0] for flags in drawn.replays] == [False, True]
    )
    model = cycle_model.run(engine, vectors.replays)
    unit = engine.create()
    names = ["score", "x", "weights", "scale", "o"]
    ports = [unit.score, unit.x, unit.weights[0], unit.scale[0], unit.o]
    watch = {"phase": unit.phase}
    for name, port in zip(names, ports, strict=True):
        watch |= {f"{name} valid": port.valid, f"{name} ready": port.ready}
    seen: list[dict[str, int]] = []
    simulate(
        unit,
        vectors.beats() | vectors.core_beats(model.jobs),
        {"o": 2 * engine.core.tiles, "dealt": len(model.jobs)},
        watch=watch,
        on_cycle=lambda cycle, values: seen.append(values),
        settle=2,
    )
    figure, axes = plt.subplots(figsize=(9.5, 3.4))
    cycles = np.arange(len(seen))
    for number, name in enumerate(names):
        base = -number * 1.3
        passed = [row[f"{name} valid"] and row[f"{name} ready"] for row in seen]
        axes.step(
            cycles,
            base + 0.8 * np.array([row[f"{name} valid"] for row in seen]),
            where="post",
            color=INK,
            lw=0.9,
        )
        axes.bar(
            cycles + 0.5, [0.8 * p for p in passed], 1.0, bottom=base, color="#e9965a", linewidth=0
        )
        axes.text(-1, base + 0.4, name, ha="right", va="center", fontsize=8)
    phases = [row["phase"] for row in seen]
    base = -len(names) * 1.3
    start = 0
    for end in range(1, len(phases) + 1):
        if end == len(phases) or phases[end] != phases[start]:
            axes.add_patch(
                plt.Rectangle(
                    (start, base), end - start, 0.8, facecolor=SOFT, edgecolor=INK, lw=0.7
                )
            )
            if end - start > 2:
                axes.text(
                    (start + end) / 2,
                    base + 0.4,
                    Phase(phases[start]).name.lower(),
                    ha="center",
                    va="center",
                    fontsize=7,
                )
            start = end
    axes.text(-1, base + 0.4, "phase", ha="right", va="center", fontsize=8)
    second = max(t for t in range(1, len(phases)) if phases[t] == 0 and phases[t - 1] == Phase.SEAL)
    axes.axvline(second, color=INK, lw=0.8, ls=":")
    axes.text(second / 2, 1.2, f"computed: {second} cycles", ha="center", fontsize=8)
    axes.text(
        (second + len(seen)) / 2,
        1.2,
        f"replayed: {len(seen) - 2 - second} cycles",
        ha="center",
        fontsize=8,
    )
    axes.set_xlim(-0.5, len(seen))
    axes.set_ylim(base - 0.3, 1.9)
    axes.set_yticks([])
    axes.set_xlabel("clock cycle; line: valid, filled: a beat passes", fontsize=8)
    axes.tick_params(labelsize=7)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(
        path, bbox_inches="tight", metadata={"Date": None} if path.suffix == ".svg" else None
    )
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("docs/hardware"))
    parser.add_argument("suffix", nargs="?", default="svg")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    diagram(args.folder / f"engine.{args.suffix}")
    waves(args.folder / f"waves.{args.suffix}")
