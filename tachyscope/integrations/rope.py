"""Rotary positions of a video model that calls a `VideoCache`."""

from __future__ import annotations

import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.types import CustomRope, Rope, Shape


def video_rope(head_dim: int, theta: float = 10000.0) -> Rope:
    """Rotary positions over (t, y, x), with a head's channels split as Wan does."""
    if head_dim % 2:
        raise TachyscopeError(
            f"rotary positions turn pairs of channels, got heads of {head_dim}: give rotated=True"
        )
    side = 2 * (head_dim // 6)
    time = head_dim - 2 * side
    axes = ((time, (1.0, 0.0, 0.0)), (side, (0.0, 1.0, 0.0)), (side, (0.0, 0.0, 1.0)))
    return Rope(axes, theta)


def check_turn(rope: CustomRope, shape: Shape) -> None:
    """Raise unless a rotation given as a function returns what `VideoCache` expects of it."""
    assert rope.turn is not None
    pos = shape.positions(0, 1)
    wanted = [(len(pos), shape.head_dim // 2)] * 2
    try:
        found = [tuple(x.shape) for x in rope.turn(pos)]
    except (RuntimeError, TypeError, ValueError, IndexError) as fault:
        raise TachyscopeError(f"`rope` of positions {tuple(pos.shape)}: {fault}") from fault
    if found != wanted:
        raise TachyscopeError(
            f"`rope` of positions {tuple(pos.shape)} must return cos and sin of shape {wanted[0]}, "
            f"got {', '.join(map(str, found))}"
        )


def no_rotation(pos: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """cos and sin of an angle of zero."""
    one = torch.ones(*pos.shape[:-1], channels // 2, device=pos.device)
    return one, torch.zeros_like(one)
