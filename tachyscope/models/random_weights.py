"""Random weights for modules of any size: for tests, and to measure time without a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from tachyscope.models.checkpoint import allocate

M = TypeVar("M", bound=nn.Module)


def random_module(
    module: M,
    seed: int,
    device: torch.device | str,
    where: str,
    scale: Callable[[str, Tensor], object],
) -> M:
    """A module on the meta device given memory on `device` and normally distributed weights.

    `scale` is called with each parameter's name and its draw, which it changes in place.
    """
    module = allocate(module, device, where)
    generator = torch.Generator(device).manual_seed(seed)
    for name, weight in module.named_parameters():
        # always in float32, so that every dtype rounds the same weights
        drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float32, device=device)
        scale(name, drawn)
        weight.data.copy_(drawn)
    return module
