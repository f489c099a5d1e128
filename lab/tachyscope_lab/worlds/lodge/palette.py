"""Colours by name, as prompts name them."""

from __future__ import annotations

import torch
from torch import Tensor

PALETTE = {  # as a screen shows them
    "white": (0.94, 0.93, 0.90),
    "cream": (0.93, 0.86, 0.70),
    "grey": (0.60, 0.62, 0.65),
    "black": (0.17, 0.17, 0.20),
    "red": (0.76, 0.28, 0.24),
    "orange": (0.90, 0.56, 0.30),
    "yellow": (0.93, 0.79, 0.42),
    "green": (0.46, 0.63, 0.42),
    "teal": (0.22, 0.56, 0.58),
    "blue": (0.34, 0.49, 0.74),
    "pink": (0.90, 0.67, 0.67),
    "brown": (0.58, 0.40, 0.27),
}
COLOURS = tuple(PALETTE)


def _numbers(names: str) -> tuple[int, ...]:
    return tuple(COLOURS.index(name) for name in names.split())


LIGHT = _numbers("white cream grey yellow pink green blue")  # paints of whole rooms
PAINTS = _numbers("white cream grey red orange yellow green teal blue pink")
WARM = _numbers("brown cream grey orange white red")  # floors
VIVID = _numbers("red orange yellow green teal blue pink white")


def to_linear(shown: Tensor) -> Tensor:
    """Reflected light of colours as a screen shows them."""
    return shown.clamp(min=0) ** 2.2


def reflectances(device: torch.device | str = "cpu") -> Tensor:
    """[colours, 3]"""
    return to_linear(torch.tensor(list(PALETTE.values()), device=device))
