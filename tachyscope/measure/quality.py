"""Quality in pixels: PSNR, SSIM, sharpness, motion, and frozen or flat frames.

Frames are uint8 [F, H, W, 3]; differences are in levels of 0..255. Every function works on one
chunk; `Quality` accumulates chunks, so that no video is held in memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt

from tachyscope.core.errors import TachyscopeError, shown

Frames = npt.NDArray[np.uint8]
Values = npt.NDArray[np.float64]

PSNR_CAP = 100.0  # dB of equal frames, whose PSNR is infinite
FROZEN = 0.1  # levels: a frame that changes less is frozen
FLAT = 2.0  # levels: a frame of less contrast is flat


def psnr(a: Frames, b: Frames) -> Values:
    """Peak signal-to-noise ratio of each frame [F]: 10 log10(255² / MSE) dB, at most 100 dB."""
    check_frames(a)
    check_frames(b)
    if a.shape != b.shape:
        raise TachyscopeError(
            f"psnr compares frames of one shape, got {list(a.shape)} and {list(b.shape)}: "
            "compare videos of one length and size"
        )
    out = np.empty(len(a))
    for i, (left, right) in enumerate(zip(a, b, strict=True)):
        error = float(np.square(left.astype(np.int32) - right).mean())
        out[i] = min(PSNR_CAP, 10 * math.log10(255**2 / error)) if error else PSNR_CAP
    return out


def detail(frames: Frames) -> Values:
    """Mean absolute Laplacian (four neighbours) of each frame's grey picture [F], in levels."""
    check_frames(frames)
    if min(frames.shape[1:3]) < 3:
        raise TachyscopeError(
            f"a Laplacian needs 3 x 3 pixels, got {frames.shape[1]} x {frames.shape[2]}: "
            "give larger frames"
        )
    out = np.empty(len(frames))
    for i, frame in enumerate(frames):
        grey = frame.mean(-1, dtype=np.float32)
        around = grey[:-2, 1:-1] + grey[2:, 1:-1] + grey[1:-1, :-2] + grey[1:-1, 2:]
        out[i] = np.abs(around - 4 * grey[1:-1, 1:-1]).mean(dtype=np.float64)
    return out


def has_ssim() -> bool:
    """Whether SSIM can be measured: torchmetrics is installed."""
    return find_spec("torchmetrics") is not None


def ssim(a: Frames, b: Frames) -> Values:
    """Structural similarity of each frame [F], by torchmetrics: 1 where they are equal."""
    check_frames(a)
    check_frames(b)
    if not has_ssim():
        raise TachyscopeError("SSIM is measured by torchmetrics: pip install torchmetrics")
    import torch
    from torchmetrics.functional.image import structural_similarity_index_measure

    out = np.empty(len(a))
    for i, pair in enumerate(zip(a, b, strict=True)):
        # in float32 a frame would not quite equal itself
        x, y = (torch.from_numpy(frame).permute(2, 0, 1)[None].double() / 255 for frame in pair)
        out[i] = torch.as_tensor(structural_similarity_index_measure(x, y, data_range=1.0))
    return out


def motion(frames: Frames, before: Frames | None = None) -> Values:
    """Mean absolute difference of each frame to the one before it, in levels.

    [F - 1] values; [F] where `before` [H, W, 3] gives the frame ahead of the first.
    """
    check_frames(frames)
    if before is not None:
        frames = np.concatenate([before[None], frames])
    steps = zip(frames[:-1], frames[1:], strict=True)
    return np.array([np.abs(b.astype(np.int16) - a).mean() for a, b in steps], np.float64)


def contrast(frames: Frames) -> Values:
    """Standard deviation of each frame's grey picture [F], in levels."""
    check_frames(frames)
    return np.array([frame.mean(-1, dtype=np.float32).std() for frame in frames], np.float64)


@dataclass(slots=True)
class Quality:
    """Sums over a video that arrives in chunks, with or without a reference to compare with.

    `against` names the reference in the keys: `psnr_dense`, `psnr_truth`.
    """

    against: str = "dense"
    frames: int = 0
    psnrs: list[float] = field(default_factory=list)  # of every frame
    frozen_frames: int = 0  # that do not change from the frame before
    flat_frames: int = 0
    _moved: float = 0.0
    _detail: float = 0.0
    _reference_detail: float = 0.0
    _last: Frames | None = None

    def add(self, frames: Frames, reference: Frames | None = None) -> dict[str, float]:
        """Add a chunk and return its own row: motion, and with a reference PSNR and sharpness."""
        row: dict[str, float] = {}
        if reference is not None:
            near = psnr(frames, reference)
            self.psnrs += near.tolist()
            row[f"psnr_{self.against}"] = float(near.mean())
            own, other = float(detail(frames).sum()), float(detail(reference).sum())
            self._detail += own
            self._reference_detail += other
            row["sharpness"] = _ratio(own, other)
        steps = motion(frames, self._last)
        if len(steps):
            row["motion"] = float(steps.mean())
        self.frames += len(frames)
        self._moved += float(steps.sum())
        self.frozen_frames += int((steps < FROZEN).sum())
        self.flat_frames += int((contrast(frames) < FLAT).sum())
        # a view would keep the whole chunk alive
        self._last = frames[-1].copy()
        return row

    def summary(self) -> dict[str, float]:
        """Means over all frames so far (PSNR as the mean of the frames' dB), and counts."""
        out: dict[str, float] = {}
        if self.psnrs:
            out[f"psnr_{self.against}"] = float(np.mean(self.psnrs))
            out["sharpness"] = _ratio(self._detail, self._reference_detail)
        if self.frames > 1:
            out["motion"] = self._moved / (self.frames - 1)
        out["frozen_frames"] = self.frozen_frames
        out["flat_frames"] = self.flat_frames
        return out


def _ratio(value: float, reference: float) -> float:
    """Detail relative to a reference's: 1 is as sharp, less is blurred."""
    if reference:
        return value / reference
    return math.inf if value else 1.0


def check_frames(frames: Frames) -> None:
    """Raise unless this is an array uint8 [F, H, W, 3] with at least one frame."""
    if not isinstance(frames, np.ndarray):
        raise TachyscopeError(f"frames are uint8 [F, H, W, 3], got {shown(frames)}: give an array")
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or not frames.size:
        raise TachyscopeError(
            f"frames are uint8 [F, H, W, 3], got {frames.dtype} {list(frames.shape)}: convert them"
        )
