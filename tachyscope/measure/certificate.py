"""What a certificate shows: its page, the contact sheet, and the plans of a prompt side by side."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from tachyscope.io.files import replacing
from tachyscope.io.results import Document
from tachyscope.io.video import VideoWriter, beside, read_video, resize_frames
from tachyscope.measure.page import (
    facts_of,
    html_facts,
    html_page,
    html_picture,
    html_section,
    html_table,
    html_video,
)
from tachyscope.measure.quality import Frames
from tachyscope.measure.runs import number

COLUMNS = 6  # pictures of a video on the contact sheet
WIDTH = 208  # of one, in pixels
LANE = 416  # width of a plan's video beside others

# rows of the page's table, each over a plan's videos of one length
LINES: tuple[tuple[str, str, Callable[[Sequence[float]], float], int], ...] = (
    ("frames/s once warm, with pixels", "fps_steady", statistics.median, 2),
    ("frames/s, warm-up included", "fps_avg", statistics.median, 2),
    ("frames/s at the end", "fps_end", statistics.median, 2),
    ("first frame after, s (the slowest)", "first_frame_s", max, 1),
    ("warm-up, s (the longest)", "warm_s", max, 1),
    ("GPU memory promised, GB", "promised_gb", max, 2),
    ("GPU memory measured, GB", "peak_gb", max, 2),
    ("RAM promised, GB", "promised_ram_gb", max, 2),
    ("RAM of the whole process, GB", "ram_gb", max, 2),
    ("PSNR to dense, dB", "psnr_dense", statistics.fmean, 1),
    ("LPIPS to dense", "lpips_dense", statistics.fmean, 4),
    ("LPIPS to dense, first fifth", "lpips_dense_first", statistics.fmean, 4),
    ("LPIPS to dense, last fifth", "lpips_dense_last", statistics.fmean, 4),
    ("drift of colour, levels of 255", "drift_colour", statistics.fmean, 2),
    ("drift of contrast, last fifth to first", "drift_contrast", statistics.fmean, 3),
    ("drift of detail, last fifth to first", "drift_detail", statistics.fmean, 3),
    ("frozen frames", "frozen_frames", sum, 0),
    ("flat frames", "flat_frames", sum, 0),
)


def summary(rows: Sequence[Document]) -> list[dict[str, Any]]:
    """A column for every plan and length: the number of its videos, and its measures over them."""
    groups: dict[tuple[Any, ...], list[Document]] = {}
    for row in rows:
        groups.setdefault((row["asked"], row["plan"], row["again"]), []).append(row)
    columns = []
    for (asked, plan, again), runs in groups.items():
        made = [row for row in runs if row["frames"]]
        name = f"{plan} again" if again else str(plan)
        column: dict[str, Any] = {"name": name, "asked": asked, "runs": len(made)}
        column["frames"] = min((row["frames"] for row in made), default=0)
        for _, key, combine, _ in LINES:
            # null if it was not a number
            values = [row[key] for row in made if row.get(key) is not None]
            if values:
                column[key] = combine(values)
        columns.append(column)
    return columns


def certificate_page(document: Document, contact: Path, videos: Path) -> str:
    """The certificate as one HTML file."""
    columns = summary(document["rows"])
    settings = document["settings"]
    facts = {
        "Model": f"{settings['model']}, {settings['size']}, {settings['dtype']}",
        "Weights": ", ".join(map(str, document["fingerprints"].values())),
        "Downloaded from": ", ".join(f"{k} at {v}" for k, v in settings["revisions"].items()),
        "Not measured": document.get("missing", ""),
    }
    shown = {name: escape(value) for name, value in facts.items() if value}
    tables = [
        html_section(f"{asked} frames", _table([c for c in columns if c["asked"] == asked]))
        for asked in dict.fromkeys(column["asked"] for column in columns)
    ]
    lead = (
        "Dense again is the same video made twice: a difference that is no larger says nothing. "
        "Distances are measured on the mp4 files beside this page."
    )
    sections = [
        html_facts(shown | facts_of(document)),
        *tables,
        html_section("Pictures", html_picture(contact.read_bytes(), "contact sheet")),
        html_section("Side by side", html_video(videos.read_bytes(), "plans side by side")),
    ]
    return html_page(f"Certificate: {settings['model']}", lead, sections)


def _table(columns: Sequence[Mapping[str, Any]]) -> str:
    rows = {
        "videos": [str(column["runs"]) for column in columns],
        "frames of each": [_frames(column) for column in columns],
    }
    for name, key, _, digits in LINES:
        if any(key in column for column in columns):
            rows[name] = [f"{c[key]:.{digits}f}" if key in c else "–" for c in columns]
    return html_table([escape(column["name"]) for column in columns], rows, "measures by plan")


def _frames(column: Mapping[str, Any]) -> str:
    if not column["runs"]:
        return "does not fit"
    bounded = " (what fits)" if column["frames"] < column["asked"] else ""
    return f"{number(column['frames'])}{bounded}"


def sheet(path: Path, videos: Mapping[str, Path]) -> None:
    """Write a picture of some frames of every video: a row each."""
    rows = [np.asarray(_row(video, name), np.uint8)[0] for name, video in videos.items()]
    width = max(row.shape[1] for row in rows)
    padded = [np.pad(row, ((0, 0), (0, width - row.shape[1]), (0, 0))) for row in rows]
    _write_png(path, np.concatenate(padded))


def _row(video: Path, name: str) -> Frames:
    count = sum(1 for _ in read_video(video))
    wanted = np.linspace(0, count - 1, min(COLUMNS, count)).round().astype(int)
    frames = [f for i, f in enumerate(read_video(video)) if i in set(wanted.tolist())]
    shown = [_scaled(frame[None], WIDTH) for frame in frames]
    labels = [f"{name if i == 0 else ''} {at + 1}".strip() for i, at in enumerate(wanted)]
    return beside(shown, labels)


def _scaled(frames: Frames, width: int) -> Frames:
    """Frames of about that width, in their shape."""
    height = max(1, round(frames.shape[1] * width / frames.shape[2]))
    return resize_frames(frames, height, width)


def _write_png(path: Path, picture: np.ndarray) -> None:
    from PIL import Image

    with replacing(path) as part:
        Image.fromarray(picture).save(part, format="PNG")


def side_by_side(path: Path, lanes: Mapping[str, Path], fps: float) -> None:
    """Write videos beside each other under their names, up to the end of the shortest."""
    with ExitStack() as stack:
        file = stack.enter_context(VideoWriter(path, fps))
        for frames in zip(*(read_video(video) for video in lanes.values()), strict=False):
            small = [_scaled(np.asarray(frame)[None], LANE) for frame in frames]
            file.write(beside(small, list(lanes)))
