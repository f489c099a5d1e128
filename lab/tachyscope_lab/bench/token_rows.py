"""The plans that a token model's benchmark times, by row, and what FastCar published of them."""

from __future__ import annotations

FRAMES = 8  # of a video
NEVER, ALWAYS = 1e9, -1e9  # thresholds


def _share(of_all: float) -> float:
    """Of tokens that can be replayed, when so many of all are: frame 0 cannot."""
    return of_all * FRAMES / (FRAMES - 1)


SHORT, LONG = ("attention=window:tokens=16,sink=4", "attention=window:tokens=256,sink=4")
ALL = f"replay=attentive:threshold={ALWAYS:g}"
# what matters most first: time may run out
ROWS = {
    "dense": "cache=keep_all",
    "all": ALL,
    "all-window16": f"{SHORT} {ALL}",
    "replay80": f"replay=random:share={_share(0.8):.4f}",
    "neurons75": "replay=neurons:share=0.75",
    "neurons75-window16": f"{SHORT} replay=neurons:share=0.75",
    "prune75": "replay=prune:share=0.75",
    "window16": SHORT,
    "input-all": "replay=input:threshold=1e6",
    "scored": f"replay=attentive:threshold={NEVER:g}",
    "replay50": f"replay=random:share={_share(0.5):.4f}",
    "neurons50": "replay=neurons:share=0.5",
    "replay20": f"replay=random:share={_share(0.2):.4f}",
    "all-window256": f"{LONG} {ALL}",
    "all-merge4f": f"cache=merge:budget=4f {ALL}",
    "window256": LONG,
    "merge4f": "cache=merge:budget=4f",
}
# passes over a token and so many drafts
DRAFTS = {f"draft{count}": f"passes=draft:places={count}" for count in (32, 16, 64)}
DRAFTS["draft32-neurons75"] = f"{DRAFTS['draft32']} {ROWS['neurons75']}"
NAMES = (*ROWS, *DRAFTS)
# FastCar's table for VILA-U-7B-256, 8 frames, on an Alveo U280 (docs/results.md)
PAPER = {
    "dense": 1.0, "window256": 1.02, "window16": 1.04, "replay20": 1.24, "replay50": 1.45,
    "replay80": 1.76, "all-window256": 1.95, "all-window16": 2.13,
}  # fmt: skip
