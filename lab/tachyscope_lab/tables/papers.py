"""What the two papers print, and ours beside it."""

from __future__ import annotations

from tachyscope_lab.results import Document, Results
from tachyscope_lab.tables.markdown import number, percent, table, times

# FAST-AR's Table 1: row, PSNR, density, recall, speed-up of the component, of all; and our plan
FAST_AR = (
    ("Dense FA3", "", "100 %", "100 %", "1.0", "1.0", "dense"),
    ("TeaCache", "16.12", "93.2 %", "84.6 %", "1.1", "", "passes=teacache:threshold=0.15"),
    ("FlowCache", "22.15", "82.9 %", "86.9 %", "2.3", "", "passes=flowcache:threshold=0.2"),
    ("TempCache-LSH, -Quant", "24.13, 24.26", "16.8, 16.2 %", "90.2, 91.4 %", "6.8, 6.9",
     "3.0, 3.2", "cache=merge:threshold=0.95"),
    ("the same, by budget", "", "", "", "", "", "cache=merge:budget=21f,newest=3"),
    ("SVG1", "14.22", "76.1 %", "30.2 %", "0.1", "", "attention=svg"),
    ("SVG2", "14.29", "68.8 %", "38.9 %", "0.2", "", "attention=svg2"),
    ("RadialAttn", "16.87", "81.6 %", "58.3 %", "2.8", "", "attention=radial"),
    ("AnnSA-LSH", "25.73", "27.6 %", "92.4 %", "5.1", "2.7", "attention=ann:read=0.28,hash=lsh"),
    ("AnnSA-Quant", "25.77", "28.0 %", "92.6 %", "5.2", "2.8", "attention=ann:read=0.3"),
    ("AnnCA-LSH", "25.68", "33.1 %", "94.2 %", "2.2", "1.2", "text=ann:hash=lsh"),
    ("AnnCA-Quant", "24.11", "29.5 %", "91.1 %", "2.3", "1.2", "text=ann:hash=int8"),
    ("FlowCache+RadialAttn", "16.98", "", "", "", "4.4",
     "attention=radial passes=flowcache:threshold=0.2"),
    ("All, LSH", "25.71", "", "", "", "10.7", "fast-ar"),
    ("All, Quant", "25.73", "", "", "", "10.8",
     "fast-ar attention=ann:hash=int8 text=ann:hash=int8"),
    ("ours: a window of 21 latent frames", "", "", "", "", "", "cache=window:budget=21f"),
    ("ours: `balanced`", "", "", "", "", "", "balanced"),
    ("ours: `fast`", "", "", "", "", "", "fast"),
    ("ours: `live`", "", "", "", "", "", "live"),
)  # fmt: skip
# entries of world, the first that has a plan is taken
FAST_AR_ENTRIES = ("policies", "plans", "fast-ar", "fast-ar-more")
# its speed-ups of everything, and rows of wan-chunks
FAST_AR_SPEED = (
    ("TempCache-Quant", "3.2", "merge21", "`merge21`: 21 latent frames"),
    ("All, Quant", "10.8", "fast", "`live`'s cache and attention"),
    ("All, Quant", "10.8", "headline", "`headline`: a fifth read"),
    ("AnnCA-Quant, beside the others", "1.2", "text-ann", "`text-ann`"),
    ("the same without it", "", "read.2", "`read.2`"),
    ("not in the paper", "", "window21", "`window21`"),
)
# FastCar's table: row, PSNR, LPIPS, VBench, seconds, speed-up; and our row of tokens-decode
FASTCAR = (
    ("Dense", "", "", "74.1 %", "689.7", "1.00", "dense"),
    ("StreamingLLM, local 256", "18.25", "33.59", "72.1 %", "670.5", "1.02", "window256"),
    ("StreamingLLM, local 16", "13.30", "53.75", "64.5 %", "662.7", "1.04", "window16"),
    ("FastCar, 20 %", "17.94", "27.57", "73.2 %", "556.8", "1.24", "replay20"),
    ("FastCar, 50 %", "17.85", "28.08", "71.5 %", "475.3", "1.45", "replay50"),
    ("FastCar, 80 %", "17.71", "29.50", "71.5 %", "390.7", "1.76", "replay80"),
    ("FastCar, 87 % + local 256", "17.44", "31.27", "71.8 %", "354.5", "1.95", "all-window256"),
    ("FastCar, 87 % + local 16", "17.27", "32.37", "71.6 %", "324.3", "2.13", "all-window16"),
)


def fast_ar(results: Results) -> str:
    """FAST-AR's Table 1; ours are means on the trained world model, 24 frames to dense's own."""
    found: dict[str, Document] = {}
    for entry in FAST_AR_ENTRIES:
        found = results.by("world", entry) | found
    rows = []
    for paper, psnr, density, _, _, speed, plan in FAST_AR:
        row = found[plan]
        rows.append([
            paper, psnr, density, speed, f"`{plan}`", number(row["psnr_dense"]),
            percent(row["density"], 1), percent(row.get("recall"), 1),
            percent(row["work_dense"], 1),
        ])  # fmt: skip
    return table(
        ["paper's row", "PSNR", "density", "speed-up", "ours", "dB to dense", "pairs", "recall",
         "work"],
        rows,
    )  # fmt: skip


def fast_ar_speed(results: Results) -> str:
    """FAST-AR's speed-ups, and ours to an unbounded dense cache over 1,880 frames."""
    found = results.by("wan-chunks", "all", "name")
    rows = []
    for row, paper, name, label in FAST_AR_SPEED:
        ours = found[name]["times"]["dense"]["1880"]
        rows.append([row, paper, label, times(ours["fps"], 1), times(ours["fps_end"], 1)])
    return table(["paper's row", "all", "ours", "1,880 frames", "at their end"], rows)


def fastcar(results: Results) -> str:
    """FastCar's table (a U280), and ours on one H200."""
    found = {
        row["name"]: row
        for row in reversed(results.rows("tokens-decode", "all"))
        if row["weights"] == "bf16" and row["rows"] == 1
    }
    return table(
        ["paper's row", "PSNR", "VBench", "x (FPGA)", "ours: x, trunk", "x, step"],
        [
            [
                row, psnr, vbench, speed, number(found[name].get("trunk_speedup"), 2),
                number(found[name].get("step_speedup"), 2),
            ]
            for row, psnr, _, vbench, _, speed, name in FASTCAR
        ],
    )  # fmt: skip
