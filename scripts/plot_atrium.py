"""Draw the losses of Atrium's trainings from their logs, and shrink their sample sheets.

python scripts/plot_atrium.py --logs docs/atrium --out docs/atrium [--sheets out/world out/tokens]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sheets", type=Path, nargs="*", default=[])
    args = parser.parse_args()
    figure, axes = plt.subplots(1, len(SHOWN), figsize=(10, 3.2), layout="constrained")
    for axis, (name, lines) in zip(axes, SHOWN.items(), strict=True):
        rows = rows_of(args.logs / f"{name}.jsonl")
        for key, label in lines.items():
            values = [row[key][0] if isinstance(row[key], list) else row[key] for row in rows]
            axis.plot([row["step"] for row in rows], values, label=label, linewidth=1.2)
        axis.set(title=f"atrium-{name}", xlabel="step", ylabel="loss", yscale="log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(args.out / "loss.png", dpi=110)
    for folder in args.sheets:
        for path in folder.glob("sheet-*.png"):
            picture = Image.open(path).convert("RGB")
            small = picture.resize((WIDE, round(picture.height * WIDE / picture.width)))
            small.save(args.out / f"{path.stem.removeprefix('sheet-')}.jpg", quality=85)


if __name__ == "__main__":
    main()
