"""Compare two finished videos."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import numpy as np

from tachyscope.core.errors import TachyscopeError
from tachyscope.io.results import Document, document
from tachyscope.io.tables import Column, table
from tachyscope.io.video import read_video
from tachyscope.measure.metrics.fvd import FEWEST, ClipFeatures, frechet_distance
from tachyscope.measure.metrics.lpips import SHORTEST_SIDE, Lpips
from tachyscope.measure.metrics.weights import COMMAND, I3D, LPIPS, has_weights
from tachyscope.measure.quality import Frames, Quality, has_ssim, ssim

STRETCH = 160  # frames of each row after the first, which shows drift


@dataclass
class _Stretch:
    """Measures of consecutive frames."""

    first: int
    quality: Quality = field(default_factory=lambda: Quality(against="reference"))
    similar: list[float] = field(default_factory=list)  # SSIM, if torchmetrics is installed
    differ: list[float] = field(default_factory=list)  # LPIPS, if its weights are installed

    def add(
        self, frame: Frames, reference: Frames, similar: list[float], differ: list[float]
    ) -> None:
        self.quality.add(frame[None], reference[None])
        self.similar += similar
        self.differ += differ

    def row(self) -> Document:
        values: Document = {"first": self.first, "frames": self.quality.frames}
        values |= self.quality.summary()
        values["psnr_worst"] = min(self.quality.psnrs)
        values |= {"ssim": float(np.mean(self.similar))} if self.similar else {}
        return values | ({"lpips": float(np.mean(self.differ))} if self.differ else {})


def compare_videos(
    path: str | os.PathLike[str],
    reference: str | os.PathLike[str],
    command: str = "",
    weights: Path | None = None,
) -> Document:
    """How near a video comes to a reference: PSNR, SSIM, LPIPS, FVD, sharpness, motion.

    The first row is of the whole video, then one of every stretch of 160 frames. Both are read a
    frame at a time. SSIM is measured where torchmetrics is installed; LPIPS (frames of 64 x 64
    pixels or more) and FVD (32 frames or more) where their weights are in the folder `weights`, or
    in the user's cache.
    """
    lpips: Lpips | None = None
    clips: tuple[ClipFeatures, ClipFeatures] | None = None
    if has_weights(I3D, weights):
        features = ClipFeatures.load(weights)
        clips = features, features.again()
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
        if i == 0 and has_weights(LPIPS, weights) and min(frame.shape[:2]) >= SHORTEST_SIDE:
            lpips = Lpips.load(weights)
        if i % STRETCH == 0:
            stretches.append(_Stretch(i))
        similar = ssim(frame[None], other[None]).tolist() if has_ssim() else []
        differ = [] if lpips is None else lpips(frame[None], other[None]).tolist()
        for part in (whole, stretches[-1]):
            part.add(frame, other, similar, differ)
        for seen, pixels in zip(clips or (), (frame, other), strict=bool(clips)):
            seen.add(pixels[None])
    if not whole.quality.frames:
        raise TachyscopeError(f"{path} has no frames: give a video file, or an image")
    parts = stretches if len(stretches) > 1 else []
    rows = [part.row() for part in (whole, *parts)]
    if clips is not None and (count := len(clips[0].features)) >= FEWEST:
        distance = frechet_distance(clips[0].features, clips[1].features)
        rows[0] |= {"fvd": distance, "fvd_clips": count}
    return document("videos", rows, command, video=os.fspath(path), reference=os.fspath(reference))


SHOWN = (
    Column("frames", lambda row: f"{row['first'] + 1} to {row['first'] + row['frames']}"),
    Column("PSNR, dB", "psnr_reference", ".2f", none="nan"),
    Column("worst frame", "psnr_worst", ".2f", none="nan"),
    Column("SSIM", "ssim", ".4f", none="nan"),
    Column("LPIPS", "lpips", ".4f", none="nan"),
    Column("sharpness", "sharpness", ".3f", none="nan"),
    Column("motion", "motion", ".2f", none="nan"),
    Column("frozen", "frozen_frames", ".0f", none="nan"),
    Column("flat", "flat_frames", ".0f", none="nan"),
)


def lines(document: Document) -> list[str]:
    """The comparison as a table."""
    rows = document["rows"]
    out = table([one for one in SHOWN if callable(one.of) or one.of in rows[0]], rows)
    if "fvd" in rows[0]:
        out.append(
            f"FVD {rows[0]['fvd']:.1f} over {rows[0]['fvd_clips']} clips of 16 frames: compare it "
            f"with values over as many clips alone"
        )
    footer = (
        f"{document['video']} to {document['reference']}; sharpness is a ratio of detail, motion "
        f"in levels of 255; frozen and flat frames are counted"
    )
    if "ssim" not in rows[0]:
        footer += "; for SSIM: pip install torchmetrics"
    if not (has_weights(LPIPS) and has_weights(I3D)):
        footer += f"; for LPIPS and FVD: {COMMAND}"
    return [*out, footer]
