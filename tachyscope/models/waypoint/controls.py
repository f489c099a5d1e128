"""Waypoint's actions as inputs: buttons by Windows' virtual-key codes, mouse and wheel."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

W, A, S, D, SPACE, SHIFT, CLICK = 0x57, 0x41, 0x53, 0x44, 0x20, 0x10, 0x01
TURN, PITCH = 0.4, 0.3  # mouse movement, as in the authors' first example


class Press(NamedTuple):
    """The inputs of a latent frame."""

    buttons: tuple[int, ...] = ()
    mouse: tuple[float, float] = (0.0, 0.0)  # to the right, down
    wheel: int = 0  # its direction: -1, 0 or 1

    def row(self, buttons: int) -> Tensor:
        """The control vector [buttons + 3]: mouse, buttons, wheel."""
        row = torch.zeros(buttons + 3, dtype=torch.float64)
        row[:2] = torch.tensor(self.mouse, dtype=torch.float64)
        for button in self.buttons:
            row[2 + button] = 1
        row[-1] = self.wheel
        return row


LEFT, RIGHT = (-TURN, 0.0), (TURN, 0.0)
PRESSES = {
    ".": Press(),
    "w": Press((W,)),
    "s": Press((S,)),
    "a": Press((A,)),
    "d": Press((D,)),
    "i": Press(mouse=(0.0, -PITCH)),
    "k": Press(mouse=(0.0, PITCH)),
    "j": Press(mouse=LEFT),
    "l": Press(mouse=RIGHT),
    "q": Press((W,), LEFT),
    "e": Press((W,), RIGHT),
    "r": Press((W, SHIFT)),
    "u": Press((SPACE,)),
    "f": Press((CLICK,)),
    "+": Press(wheel=1),
    "-": Press(wheel=-1),
}
ACTIONS = "".join(PRESSES)
CHORDS = {"q": "wj", "e": "wl"}


def table(buttons: int, device: torch.device | str) -> Tensor:
    """The control vectors of all actions [A, buttons + 3]."""
    return torch.stack([press.row(buttons) for press in PRESSES.values()]).to(device)
