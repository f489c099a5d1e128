"""FVD (arXiv 1812.01717): the Fréchet distance of two sets of clips in I3D's features.

Its value falls with the number of clips, so only values over equally many may be compared; papers
use 2,048.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from tachyscope.core.errors import TachyscopeError
from tachyscope.io.torch_defaults import no_autocast
from tachyscope.measure.metrics.i3d import I3D as Network
from tachyscope.measure.metrics.i3d import SIDE
from tachyscope.measure.metrics.weights import I3D, with_weights
from tachyscope.measure.quality import Frames, check_frames

CLIP = 16  # frames, as in the paper
FEWEST = 2  # clips: one has no variance

Features = npt.NDArray[np.float64]  # [clips, 400]


class ClipFeatures:
    """I3D's features of a video that arrives in parts: a row for every 16 consecutive frames."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._frames: deque[torch.Tensor] = deque()
        self._rows: list[Features] = []

    @classmethod
    def load(cls, folder: Path | None = None, device: torch.device | str = "cpu") -> ClipFeatures:
        """With the published weights, from a folder or the user's cache."""
        return cls(with_weights(Network(), I3D, folder, device))

    def again(self) -> ClipFeatures:
        """For another video, by the same network."""
        return ClipFeatures(self.network)

    @torch.inference_mode()
    def add(self, frames: Frames) -> None:
        """Add frames uint8 [F, H, W, 3] of any size; they are resized to 224 x 224."""
        check_frames(frames)
        device = self.network.scores.weight.device
        for frame in frames:
            x = torch.from_numpy(frame.copy()).to(device).permute(2, 0, 1)[None].float()
            self._frames.append(F.interpolate(x, (SIDE, SIDE), mode="bilinear")[0] / 127.5 - 1)
            if len(self._frames) == CLIP:
                with no_autocast():
                    row = self.network(torch.stack(tuple(self._frames), 1)[None])
                self._rows.append(row.double().cpu().numpy())
                self._frames.clear()

    @property
    def features(self) -> Features:
        """Of all whole clips so far."""
        return np.concatenate(self._rows) if self._rows else np.empty((0, 400))


def frechet_distance(a: Features, b: Features) -> float:
    """|mean a - mean b|² + tr(A + B - 2 (A B)^½), for the covariances A and B of their rows.

    With A = X'X and B = Y'Y of centred rows, tr (A B)^½ is the sum of the singular values of X Y',
    so that no root of a matrix is taken.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or min(len(a), len(b)) < FEWEST:
        raise TachyscopeError(
            f"a Fréchet distance is of {FEWEST} rows or more of one length on each side, got "
            f"{list(a.shape)} and {list(b.shape)}: give more clips, of {CLIP} frames each"
        )
    (mean_a, x), (mean_b, y) = (_centred(rows.astype(np.float64)) for rows in (a, b))
    roots = float(np.linalg.svd(x @ y.T, compute_uv=False).sum())
    means = float(np.square(mean_a - mean_b).sum())
    return max(0.0, means + float(np.square(x).sum() + np.square(y).sum()) - 2 * roots)


def _centred(rows: Features) -> tuple[Features, Features]:
    """The mean row, and rows whose product with themselves is the covariance."""
    mean = rows.mean(0)
    return mean, (rows - mean) / np.sqrt(len(rows) - 1)
