"""Tables of token models' times, as a reader wants them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tachyscope.io.results import Document
from tachyscope.io.tables import Column, table
from tachyscope.measure.noise import speed_word
from tachyscope_lab.bench.token_rows import FRAMES


def _trunk(row: Mapping[str, Any]) -> str | None:
    if "failed" in row:
        return str(row["failed"])
    return None if row.get("trunk_ms") is None else f"{row['trunk_ms']:.3f}"


COLUMNS = (
    Column("row", "name"), Column("weights", "weights"), Column("rows", "rows"),
    Column("trunk ms", _trunk), Column("TB/s", "trunk_tb_s", ".2f"),
    Column("of copy", "trunk_of_copy", ".2f"), Column("x dense", "trunk_speedup", ".2f"),
    Column("x after frame 0", "trunk_speedup_later", ".2f"), Column("paper x", "paper", ".2f"),
    Column("step ms", "step_ms", ".3f"), Column("x dense", "step_speedup", ".2f"),
    Column("depth ms", "depth_ms", ".3f"), Column("of copy", "depth_of_copy", ".2f"),
    Column("J a video", "joules_video", ".0f"),
)  # fmt: skip


def token_lines(results: Document) -> list[str]:
    """The document as tables."""
    low, high = (results.get("aa") or {"low": 1.0, "high": 1.0}).values()
    return [
        f"copy {results['copy_tb_s']:.2f} TB/s, read {results['read_tb_s']:.2f} TB/s; "
        f"A/A {low:.3f} to {high:.3f}",
        *table(COLUMNS, results["rows"]),
    ]


def _to_dense(row: Mapping[str, Any]) -> str | None:
    return None if row["name"] == "dense" else f"{row['ratio_dense']:.2f} {speed_word(row)}"


def _of_limit(row: Mapping[str, Any]) -> str:
    return f"{row['of_limit']:.0%} of {row['limit']:.2f}" if "limit" in row else ""


def _beside_dense(key: str) -> Callable[[Mapping[str, Any]], object]:
    return lambda row: None if row["name"] == "dense" else row.get(key)


STEPS = (
    Column("row", "name"), Column("weights", "weights"), Column("trunk ms", "trunk_ms", ".2f"),
    Column("GB/s", "gb_s", ".1f"), Column("of read", "of_read", ".2f"),
    Column("x dense", _to_dense), Column("after frame 0", _beside_dense("later_speedup"), ".2f"),
    Column("limit", _beside_dense("limit"), ".2f"),
    Column("of limit", _beside_dense("of_limit"), ".0%"),
    Column("step x", _beside_dense("step_speedup"), ".2f"), Column("depth ms", "depth_ms", ".2f"),
    Column("step ms", "step_ms", ".2f"), Column("frames/s", "frames_s", ".2f"),
)  # fmt: skip
VIDEOS = (
    Column("row", "name"), Column("camera", "camera"), Column("weights", "weights"),
    Column("places a pass", "places_a_pass", ".1f"),
    Column("MLPs replayed", lambda row: row.get("replayed", 0), ".0%"),
    Column("frame ms", "frame_ms", ".0f"), Column("frames/s", "frames_s", ".2f"),
    Column("x dense", lambda row: f"{row['ratio_dense']:.2f} {speed_word(row)}"),
    Column("A/A", lambda row: f"{row['aa'][0]:.2f} to {row['aa'][1]:.2f}"),
    Column("of limit", _of_limit),
)  # fmt: skip


def cpu_lines(results: Document) -> list[str]:
    """A document of a CPU's steps and videos as tables."""
    (low, high), first = results["aa"].values(), results["rows"][0]
    videos = [row for row in results["rows"] if "camera" in row]
    return [
        f"{first['model']}, {first['places']} tokens a frame, {FRAMES} frames, "
        f"{results['threads']} threads of {results['machine']['cpu']}; memory read at "
        f"{results['read_gb_s']:.1f} GB/s; MLPs take {first['mlp_share']:.0%} of dense's trunk",
        f"dense against itself: {low:.2f}x to {high:.2f}x; a ratio inside is noise",
        *table(STEPS, [row for row in results["rows"] if "camera" not in row]),
        *(table(VIDEOS, videos) if videos else []),
    ]
