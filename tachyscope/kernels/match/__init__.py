"""Find every new entry's most alike older one."""

from tachyscope.kernels.match.torch import alike_features, best_older

__all__ = ["alike_features", "best_older"]
