"""Temporal attention score, an MLP that runs on some rows only, what all rows' outputs share."""

from tachyscope.kernels.replay.torch import (
    follow_drift,
    grow_older,
    relative_change,
    remembered_error,
    replay_gated,
    replay_masked,
    replay_rows,
    temporal_score,
)

__all__ = [
    "follow_drift",
    "grow_older",
    "relative_change",
    "remembered_error",
    "replay_gated",
    "replay_masked",
    "replay_rows",
    "temporal_score",
]
