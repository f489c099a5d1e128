"""Two videos held against each other, whatever made them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import numpy as np

from tachyscope.errors import TachyscopeError
from tachyscope.evaluation.intervals import mean
from tachyscope.evaluation.lpips import Lpips
from tachyscope.quality import Frames, Quality, has_ssim, ssim
from tachyscope.results import Document, document
from tachyscope.tables import format_table
from tachyscope.video import read_video

STRETCH = 160  # frames by which drift is told


@dataclass
class _Stretch:
    """Measures of some frames that follow each other."""

    first: int
    quality: Quality = field(default_factory=lambda: Quality(against="reference"))
    similar: list[float] = field(default_factory=list)  # SSIM, where it can be measured
    differ: list[float] = field(default_factory=list)  # LPIPS, where its weights are given

    def add(self, frame: Frames, reference: Frames, differ: list[float]) -> None:
        self.quality.add(frame[None], reference[None])
        if has_ssim():
            self.similar += ssim(frame[None], reference[None]).tolist()
        self.differ += differ

    def row(self) -> Document:
        values: Document = {"first": self.first, "frames": self.quality.frames}
        values |= self.quality.summary()
        values["psnr_worst"] = min(self.quality.psnrs)
        values |= {"ssim": mean(self.similar)} if self.similar else {}
        return values | ({"lpips": mean(self.differ)} if self.differ else {})


def evaluate_videos(
    path: str | os.PathLike[str],
    reference: str | os.PathLike[str],
    command: str = "",
    lpips_weights: str | os.PathLike[str] | None = None,
) -> Document:
    """How near a video comes to a reference, frame by frame: PSNR, SSIM, sharpness, motion.

    The first row is of the whole video, then one of every stretch of 160 frames. Both are read a
    frame at a time. SSIM is measured where torchmetrics is installed, LPIPS where a file of
    AlexNet's weights is given too.
    """
    lpips = None if lpips_weights is None else Lpips(Path(lpips_weights))
    whole, stretches = _Stretch(0), []
    for i, (frame, other) in enumerate(zip_longest(read_video(path), read_video(reference))):
        if frame is None or other is None:
            short, long = (path, reference) if frame is None else (reference, path)
            raise TachyscopeError(
                f"videos are compared frame by frame, and {short} ends after {i}, before {long}: "
                f"cut them alike"
            )
        if frame.shape != other.shape:
            sizes = ["{}x{}".format(*x.shape[:2]) for x in (frame, other)]
            raise TachyscopeError(
                f"videos are compared at one size, got {sizes[0]} and {sizes[1]} (height x width): "
                f"scale one"
            )
        if i % STRETCH == 0:
            stretches.append(_Stretch(i))
        differ = [] if lpips is None else lpips(frame[None], other[None]).tolist()
        for part in (whole, stretches[-1]):
            part.add(frame, other, differ)
    if not whole.quality.frames:
        raise TachyscopeError(f"{path} has no frames: give a video file, or an image")
    parts = stretches if len(stretches) > 1 else []
    rows = [part.row() for part in (whole, *parts)]
    return document("videos", rows, command, video=os.fspath(path), reference=os.fspath(reference))


SHOWN = {
    "psnr_reference": ("PSNR, dB", 2),
    "psnr_worst": ("worst frame", 2),
    "ssim": ("SSIM", 4),
    "lpips": ("LPIPS", 4),
    "sharpness": ("sharpness", 3),
    "motion": ("motion", 2),
    "frozen_frames": ("frozen", 0),
    "flat_frames": ("flat", 0),
}


def lines(document: Document) -> list[str]:
    """The comparison as a reader wants it."""
    rows = document["rows"]
    shown = [key for key in SHOWN if key in rows[0]]
    cells = [
        [
            f"{row['first'] + 1} to {row['first'] + row['frames']}",
            *(f"{row.get(key, np.nan):.{SHOWN[key][1]}f}" for key in shown),
        ]
        for row in rows
    ]
    footer = (
        f"{document['video']} to {document['reference']}; sharpness is a ratio of detail, motion "
        f"in levels of 255; frozen and flat frames are counted"
    )
    if "ssim" not in rows[0]:
        footer += "; for SSIM: pip install tachyscope[eval]"
    return [*format_table(["frames", *(SHOWN[key][0] for key in shown)], cells), footer]
