"""Fold alike entries into one another."""

from tachyscope.kernels.match.torch import alike_features, best_older
from tachyscope.kernels.merge.torch import fold, roots

__all__ = ["alike_features", "best_older", "fold", "roots"]
