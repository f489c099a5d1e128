"""A replay decision by an MLP's own input: what it reads and writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Kind = Literal["threshold", "share", "budget"]


@dataclass(frozen=True, slots=True)
class InputGate:
    """Which tokens replay by how far their MLP's input is from the one that made the kept output.

    kind    and its number `limit`: see `replay/input.py`
    paired  rows b and b + B/2 decide by their mean
    dearest times the budget that one token may take of it
    place   [] int32         the token's place in its frame
    ready   [] int32         0: nothing was kept yet, so that all is computed
    skip    [B] int32        what is decided: 1 replays
    counts  [2] int32        tokens skipped; tokens that replay beside one that is computed
    input   [B, N, W]        the kept inputs, normed: those of tokens that are computed are put here
    credit  [B, 1] float32   by budget
    recent  [B, N] float32   by share: the last scores; NaN where there is none yet
    due     [B, 1] float32   by share: the share that is owed
    """

    kind: Kind
    limit: float
    paired: bool
    dearest: float
    place: Tensor
    ready: Tensor
    skip: Tensor
    counts: Tensor
    input: Tensor
    credit: Tensor | None = None
    recent: Tensor | None = None
    due: Tensor | None = None
