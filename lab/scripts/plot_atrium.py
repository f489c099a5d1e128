"""Draw the losses of Atrium's trainings from their logs, and shrink their sample sheets.

python lab/scripts/plot_atrium.py --logs docs/atrium --out DIR [--sheets out/world out/tokens]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from PIL import Image

SHOWN = {
    "world": {
        "loss": "all noise levels, weighted",
        "mse_late": "strong noise, last quarter of a clip",
    },
    "tokens": {"loss": "mean over codes", "late": "first code, second half of a clip"},
}
WIDE = 1200  # pixels of a sheet


def rows_of(path: Path) -> list[dict[str, object]]:
    return [row for row in map(json.loads, path.read_text().splitlines()) if "loss" in row]


def draw_losses(logs: Path, out: Path) -> None:
    """loss.png from the logs of a folder."""
    figure, axes = plt.subplots(1, len(SHOWN), figsize=(10, 3.2), layout="constrained")
    for axis, (name, lines) in zip(axes, SHOWN.items(), strict=True):
        rows = rows_of(logs / f"{name}.jsonl")
        for key, label in lines.items():
            values = [row[key][0] if isinstance(row[key], list) else row[key] for row in rows]
            axis.plot([row["step"] for row in rows], values, label=label, linewidth=1.2)
        axis.set(title=f"atrium-{name}", xlabel="step", ylabel="loss", yscale="log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(out / "loss.png", dpi=110)


def shrink(sheet: Path, out: Path) -> None:
    """A sample sheet as a page shows it."""
    picture = Image.open(sheet).convert("RGB")
    small = picture.resize((WIDE, round(picture.height * WIDE / picture.width)))
    small.save(out, quality=85)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sheets", type=Path, nargs="*", default=[])
    args = parser.parse_args()
    draw_losses(args.logs, args.out)
    for folder in args.sheets:
        for path in folder.glob("sheet-*.png"):
            shrink(path, args.out / f"{path.stem.removeprefix('sheet-')}.jpg")


if __name__ == "__main__":
    main()
