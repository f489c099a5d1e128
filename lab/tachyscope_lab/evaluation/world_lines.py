"""An evaluation of the world model as a table."""

from __future__ import annotations

import math

from tachyscope.io.results import Document
from tachyscope.io.tables import format_table
from tachyscope_lab.evaluation.judges import ENDS

COLUMNS_SHOWN = {
    "revisit_db": ("revisit", 1.0, 1),
    "revisit_db_worst": ("worst", 1.0, 1),
    "new_place_db": ("anew", 1.0, 1),
    "psnr_truth_24": ("to 24", 1.0, 1),
    "psnr_truth_48": ("to 48", 1.0, 1),
    "psnr_truth_96": ("to 96", 1.0, 1),
    "revisit_own_db": ("own", 1.0, 1),
    "identity": ("same %", 100.0, 0),
    "identity_last": ("at end %", 100.0, 0),
    "objects_new_place": ("objects %", 100.0, 0),
    "density": ("pairs %", 100.0, 0),
    "cache_mb": ("cache MB", 1.0, 1),
    "work_dense": ("work %", 100.0, 0),
    "recall": ("recall %", 100.0, 1),
}


def lines(results: Document) -> list[str]:
    """An evaluation as a reader wants it: the model's measures, then plans beside dense."""
    measures = []
    for key, value in results.get("world", {}).items():
        if key == "by_world" or key.endswith(("_low", "_high", "_worst")):
            continue
        low, high = results["world"].get(f"{key}_low"), results["world"].get(f"{key}_high")
        interval = f"{low:.3f} to {high:.3f}" if math.isfinite(low) else ""  # one world has none
        measures.append([key, f"{value:.3f}", interval])
    rows = results["rows"]
    shown = [key for key in COLUMNS_SHOWN if any(key in row for row in rows)]
    cells = []
    for row in rows:
        line = [row["asked"]]
        for key in shown:
            _, scale, digits = COLUMNS_SHOWN[key]
            line.append(f"{scale * row.get(key, math.nan):.{digits}f}")
        cells.append(line)
    out = format_table(["the model", "mean", "95 % interval"], measures) if measures else []
    out += format_table(["plan", *(COLUMNS_SHOWN[key][0] for key in shown)], cells)
    count, made = rows[0]["worlds"], rows[0]["frames"]
    out.append(
        f"{count} unseen worlds, {made} frames after one full turn; dB to the truth (anew: from "
        f"new places; own: to the model's first showing; worst: the worst world's revisit); same: "
        f"surfaces in view that are right, at end: in the last {ENDS} frames, objects: objects, "
        f"from new places; pairs scored and work counted, of dense's; recall: dense attention mass "
        f"that was read"
    )
    return out
