"""What caches check that move whole latent frames."""

from __future__ import annotations

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.types import Shape, Size


def check_whole_frames(policy: str, budget: Size, shape: Shape) -> None:
    """Raise where a budget is no whole number of latent frames."""
    if budget.entries(shape) % shape.tokens_per_frame:
        raise TachyscopeError(
            f"cache policy {policy!r}: budget={budget} is no whole number of latent frames of "
            f"{shape.tokens_per_frame} entries: give it as frames, for example 21f"
        )
